"""What came out of a step, as its rows asked for it."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from compiled.batch import Batch
from compiled.step import Logprob, StepResult

_T = TypeVar("_T")


def answer(
    number: int,
    batch: Batch,
    order: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[Logprob | None],
    seconds: float,
) -> StepResult:
    """The result of step ``number``: row i of ``batch`` is the step's row ``order[i]``, a range if none was moved.
    ``tokens`` are those of all rows that are sampled, ``logprobs`` those of all logit rows, or none."""
    found = _arrange(_per_row(tokens, batch.samples), order)
    if not logprobs:
        return StepResult(number, found, seconds)
    sampled = sum(batch.samples)
    drawn, scored = _per_row(logprobs[:sampled], batch.samples), _per_row(logprobs[sampled:], batch.scores)
    return StepResult(number, found, seconds, _asked(_arrange(drawn, order)), _asked(_arrange(scored, order)))


def logit_rows(batch: Batch, order: Sequence[int]) -> list[int]:
    """``batch``'s logit rows as the step has them: those that are sampled, then those that are scored."""
    rows = range(sum(batch.samples) + sum(batch.scores))
    sampled = _arrange(_per_row(rows, batch.samples), order)
    scored = _arrange(_per_row(rows[sum(batch.samples) :], batch.scores), order)
    return [row for of_row in (*sampled, *scored) for row in of_row]


def _per_row(items: Sequence[_T], counts: Sequence[int]) -> list[tuple[_T, ...]]:
    """The next ``counts[i]`` items for row i."""
    ends = accumulate(counts)
    return list(map(tuple(items).__getitem__, map(slice, accumulate(counts, initial=0), ends)))


def _arrange(rows: Sequence[tuple[_T, ...]], order: Sequence[int]) -> tuple[tuple[_T, ...], ...]:
    if isinstance(order, range):
        return tuple(rows)
    arranged: list[tuple[_T, ...]] = [()] * len(order)
    for place, row in zip(order, rows, strict=True):
        arranged[place] = row
    return tuple(arranged)


def _asked(found: Iterable[tuple[Logprob | None, ...]]) -> tuple[tuple[Logprob, ...], ...]:
    """What was asked for; nothing at all where no row asked."""
    rows = tuple(tuple(one for one in row if one is not None) for row in found)
    return rows if any(rows) else ()
