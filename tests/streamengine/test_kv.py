import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled.step import PADDING_PAGE
from streamengine.kv import KVPool


def test_every_page_but_the_padding_page_is_handed_out_once():
    pool = KVPool(pages=6, page_size=4)
    taken = pool.take(5)
    assert taken is not None and PADDING_PAGE not in taken and sorted(taken) == [1, 2, 3, 4, 5]
    assert pool.available == 0 and pool.capacity == 5
    pool.check()


def test_a_short_pool_gives_nothing_rather_than_a_part():
    pool = KVPool(pages=4, page_size=4)
    assert pool.take(4) is None
    assert pool.available == 3
    pool.check()


def test_the_first_page_of_a_freed_sequence_is_the_first_to_be_taken_again():
    pool = KVPool(pages=9, page_size=4)
    first = pool.take(3)
    assert first is not None
    pool.take(2)
    pool.free(tuple(first))
    assert pool.take(3) == first


def test_pages_for_rounds_up():
    pool = KVPool(pages=4, page_size=4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("pages", [(1, 1), (2,), (PADDING_PAGE,)])
def test_freeing_what_is_not_held_is_our_bug(pages):
    pool = KVPool(pages=4, page_size=4)
    assert pool.take(1) == [1]
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free(pages)


def test_check_finds_a_page_that_is_both_free_and_held():
    pool = KVPool(pages=4, page_size=4)
    pool._pages[2].refs = 1
    with pytest.raises(AssertionError, match="page 2 is free and held"):
        pool.check()


def test_check_finds_a_page_that_nobody_remembers():
    pool = KVPool(pages=4, page_size=4)
    pool.take(1)
    pool._pages[1].refs = 0
    with pytest.raises(AssertionError, match="2 free and 0 held of 3"):
        pool.check()


@given(st.integers(2, 12), st.lists(st.integers(-3, 6)))
def test_whatever_is_taken_and_freed_nothing_is_lost_or_doubled(pages, moves):
    """A positive move takes that many pages, a negative one frees the table at that place, modulo."""
    pool = KVPool(pages=pages, page_size=4)
    tables: list[list[int]] = []
    for move in moves:
        if move >= 0:
            table = pool.take(move)
            assert (table is None) == (move > pool.available + len(table or ()))
            if table is not None:
                tables.append(table)
        elif tables:
            pool.free(tuple(tables.pop(move % len(tables))))
        held = [page for table in tables for page in table]
        assert len(set(held)) == len(held) == pool.statistics()["kv_pages_used"]
        pool.check()
