"""A step becomes flat tensors in the layout of paged attention."""

import pytest

from compiled.batch import build
from compiled.step import Row, Sampling, Step

GREEDY = Sampling()


def test_rows_of_different_lengths_are_flattened_in_order() -> None:
    step = Step(
        7,
        (
            Row(1, (5, 6, 7), 0, (3,)),
            Row(2, (9,), 4, (2, 1), GREEDY),
            Row(3, (8, 8), 3, (4, 5), GREEDY),
        ),
    )
    batch = build(step, page_size=4, smallest=2)
    assert batch.ids_T.tolist() == [5, 6, 7, 9, 8, 8]
    assert batch.positions_T.tolist() == [0, 1, 2, 4, 3, 4]
    assert batch.qo_indptr.tolist() == [0, 3, 4, 6]
    assert batch.kv_indptr.tolist() == [0, 1, 3, 5]
    assert batch.kv_indices.tolist() == [3, 2, 1, 4, 5]
    assert batch.kv_last_page_len.tolist() == [3, 1, 1]
    assert batch.rows_R.tolist() == [3, 5]
    assert batch.sampled == (1, 2)
    assert batch.draw_at.tolist() == [5, 5]


def test_pages_beyond_the_computed_tokens_are_left_out() -> None:
    batch = build(Step(0, (Row(1, (5,), 0, (3, 8, 9)),)), page_size=4, smallest=2)
    assert batch.kv_indices.tolist() == [3]


def test_a_full_last_page_counts_whole() -> None:
    batch = build(Step(0, (Row(1, (5,), 7, (3, 8), GREEDY),)), page_size=4, smallest=2)
    assert batch.kv_last_page_len.tolist() == [4]


@pytest.mark.parametrize("sampling", [None, GREEDY])
def test_one_token_is_padded_to_the_smallest_compiled_size_without_joining_a_row(sampling: Sampling | None) -> None:
    batch = build(Step(0, (Row(1, (5,), 0, (3,), sampling),)), page_size=4, smallest=2)
    assert batch.ids_T.tolist() == [5, 0]
    assert len(batch.positions_T) == len(batch.rows_R) == 2
    assert batch.qo_indptr.tolist() == [0, 1]
