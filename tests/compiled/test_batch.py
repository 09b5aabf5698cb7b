"""A step becomes flat tensors in the layout of paged attention."""

import numpy as np
import pytest

from compiled.batch import build
from compiled.philox import uniform
from compiled.sampling_batch import Kind
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
    assert batch.samples == (0, 1, 1)
    assert batch.scores == (0, 0, 0)


def test_a_row_with_drafts_samples_after_each_of_its_last_tokens_at_its_own_position() -> None:
    drawing = Sampling(temperature=1.0, seed=7, logprobs=3)
    step = Step(0, (Row(1, (5, 6), 0, (3,), GREEDY), Row(2, (9, 1, 2, 3), 4, (2, 1), drawing, drafts=2)))
    batch = build(step, page_size=4, smallest=2)
    assert batch.samples == (1, 3)
    assert batch.rows_R.tolist() == [1, 3, 4, 5]
    assert batch.tops == (None, 3, 3, 3)
    (part,) = (part for part in batch.sampling if part.kind is Kind.WHOLE)
    assert part.rows.tolist() == [1, 2, 3]
    assert part.uniform.tolist() == uniform(np.full(3, 7), np.array([6, 7, 8])).tolist()


def test_known_next_tokens_are_scored_behind_the_rows_that_sample() -> None:
    step = Step(
        0,
        (
            Row(1, (5, 6, 7), 0, (3,), GREEDY, targets=(6, 7), targets_top=2),
            Row(2, (8, 9), 3, (2, 1), targets=(9, 4)),
        ),
    )
    batch = build(step, page_size=4, smallest=2)
    assert batch.rows_R.tolist() == [2, 0, 1, 3, 4]
    assert (batch.samples, batch.scores) == ((1, 0), (2, 2))
    assert batch.targets.tolist() == [6, 7, 9, 4]
    assert batch.tops == (None, 2, 2, 0, 0)


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
