import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled.step import PADDING_PAGE
from streamengine.kv import KVPool
from streamengine.prefix import PrefixCache


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


@pytest.mark.parametrize("pages", [(1, 1), (2,)])
def test_freeing_what_is_not_held_is_our_bug(pages):
    pool = KVPool(pages=4, page_size=4)
    assert pool.take(1) == [1]
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free(pages)


def test_check_finds_a_page_that_is_both_free_and_held():
    pool = KVPool(pages=4, page_size=4)
    pool._refs[2] = 1
    with pytest.raises(AssertionError, match="a page is blank and held"):
        pool.check()


def test_check_finds_a_page_that_nobody_remembers():
    pool = KVPool(pages=4, page_size=4)
    pool.take(1)
    pool._refs[1] = 0
    with pytest.raises(AssertionError, match="2 free and 0 held of 3"):
        pool.check()


def test_a_shared_page_is_free_when_the_last_holder_lets_go():
    pool = KVPool(pages=4, page_size=4)
    pages = tuple(pool.take(2) or ())
    pool.share(pages[:1])
    pool.free(pages)
    pool.check(pages[:1])
    assert pool.available == 2
    pool.free(pages[:1])
    pool.check([])


def test_check_finds_a_page_that_one_table_more_holds_than_the_pool_knows():
    pool = KVPool(pages=4, page_size=4)
    pages = pool.take(1) or []
    with pytest.raises(AssertionError, match="page tables say"):
        pool.check(pages * 2)


def test_a_page_that_fell_out_of_a_window_is_not_freed_with_its_table():
    pool = KVPool(pages=4, page_size=4)
    pages = pool.take(1) or []
    pool.free((PADDING_PAGE, *pages))
    pool.check([])


def test_each_time_that_a_page_is_handed_out_it_begins_a_new_generation():
    pool = KVPool(pages=2, page_size=4)
    before = pool.generations(pool.take(1) or ())
    pool.free((1,))
    assert pool.generations([1]) == before
    pool.take(1)
    assert pool.generations([1]) != before


def test_debug_tells_once_which_pages_became_blank_and_were_not_taken_again():
    pool = KVPool(pages=5, page_size=4, debug=True)
    pool.take(3)
    pool.free((1, 2, 3))
    assert pool.take(1) == [1]
    assert pool.drain_freed() == [2, 3] and pool.drain_freed() == []


def test_cached_pages_count_as_available_and_are_taken_after_all_blank_ones():
    cache = PrefixCache(page_size=2, pages=4)
    pool = KVPool(5, 2, cache)
    table = tuple(pool.take(2) or ())
    cache.add(cache.chain(""), [1, 2, 3, 4], table, 4)
    pool.free(table)
    assert pool.available == 4
    first, second = pool.take(2), pool.take(2)
    assert first is not None and set(first).isdisjoint(table)
    assert second == [table[1], table[0]], "the last page of a sequence goes first"
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
