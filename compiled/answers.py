"""What came out of a step, as its rows asked for it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
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
    """The result of step ``number``: row i of ``batch`` is the step's row ``order[i]``. ``tokens`` are those of all
    rows that are sampled, ``logprobs`` those of all logit rows, or none."""
    sampled = sum(batch.samples)
    return StepResult(
        number,
        _arrange(_per_row(tokens, batch.samples), order),
        seconds,
        _asked(_arrange(_per_row(logprobs[:sampled], batch.samples), order)),
        _asked(_arrange(_per_row(logprobs[sampled:], batch.scores), order)),
    )


def logit_rows(batch: Batch, order: Sequence[int]) -> list[int]:
    """``batch``'s logit rows as the step has them: those that are sampled, then those that are scored."""
    rows = range(sum(batch.samples) + sum(batch.scores))
    sampled = _arrange(_per_row(rows, batch.samples), order)
    scored = _arrange(_per_row(rows[sum(batch.samples) :], batch.scores), order)
    return [row for of_row in (*sampled, *scored) for row in of_row]


def _per_row(items: Iterable[_T], counts: Iterable[int]) -> Iterator[tuple[_T, ...]]:
    """The next ``counts[i]`` items for row i."""
    rest = iter(items)
    return (tuple(islice(rest, count)) for count in counts)


def _arrange(rows: Iterable[tuple[_T, ...]], order: Sequence[int]) -> tuple[tuple[_T, ...], ...]:
    arranged: list[tuple[_T, ...]] = [()] * len(order)
    for place, row in zip(order, rows, strict=True):
        arranged[place] = row
    return tuple(arranged)


def _asked(found: Iterable[tuple[Logprob | None, ...]]) -> tuple[tuple[Logprob, ...], ...]:
    """What was asked for; nothing at all where no row asked."""
    rows = tuple(tuple(one for one in row if one is not None) for row in found)
    return rows if any(rows) else ()
