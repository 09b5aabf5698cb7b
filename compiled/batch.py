"""A `Step` → the tensors that one forward pass takes.

```
rows      A A A | B | C C          a prompt's chunk, a decoding row, another chunk
ids       . . .   .   . .          T tokens, flattened
qo_indptr 0       3   4   6        where each row's tokens begin
kv_indptr 0       n_A …            where each row's pages begin in kv_indices
rows_R        2   3                index of the tokens whose logits are wanted: first those that a token is
                                   sampled after, then those whose next token is known and scored
```

No row is looped over in Python: fields are gathered by iterators written in C, and counted by numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, getitem, is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled.sampling_batch import Part, prepare
from compiled.step import Row, Step

_FIELDS = attrgetter("tokens", "start", "pages", "sampling", "drafts", "targets")


@dataclass(frozen=True)
class Batch:
    """Inputs of one step.

    ``ids_T``, ``positions_T`` (int64) and ``rows_R`` are padded to at least the compiled minimum; the
    index arrays (int32, FlashInfer's paged layout) cover the real tokens only. ``samples[i]`` logit rows
    belong to ``step.rows[i]``, then, after those of all rows, ``scores[i]``; ``targets`` [sum of scores] are the
    known tokens of the latter. ``tops`` says for each logit row how many likeliest tokens are to be reported
    beside its own; None: not even that one.
    """

    ids_T: Tensor
    positions_T: Tensor
    rows_R: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    samples: tuple[int, ...]
    scores: tuple[int, ...]
    sampling: tuple[Part, ...]
    targets: Tensor
    tops: tuple[int | None, ...]


def build(step: Step, page_size: int, smallest: int) -> Batch:
    """Flatten ``step``; tokens and logit rows are padded up to ``smallest``."""
    tokens, starts, tables, samplings, drafts, known = zip(*map(_FIELDS, step.rows), strict=True)
    lengths = _lengths(tokens)
    ends = _integers(starts) + lengths
    pages = -(-ends // page_size)
    qo_indptr, kv_indptr = _pointers(lengths), _pointers(pages)
    total = int(qo_indptr[-1])
    positions = np.arange(total) + np.repeat(ends - qo_indptr[1:], lengths)
    used = chain.from_iterable(map(getitem, tables, map(slice, pages.tolist())))
    samples = np.fromiter(map(is_not, samplings, repeat(None)), np.int64, len(samplings)) * (1 + _integers(drafts))
    sampled = _Owned.by(step.rows, samples)
    scores = _lengths(known)
    scored = _Owned.by(step.rows, scores)
    wanted = np.concatenate((sampled.count_from(qo_indptr[1:] - samples), scored.count_from(qo_indptr[:-1])))
    return Batch(
        ids_T=_padded(np.fromiter(chain.from_iterable(tokens), np.int64, total), smallest),
        positions_T=_padded(positions, smallest),
        rows_R=_padded(wanted, smallest),
        qo_indptr=_int32(qo_indptr),
        kv_indptr=_int32(kv_indptr),
        kv_indices=torch.from_numpy(np.fromiter(used, np.int32, int(kv_indptr[-1]))),
        kv_last_page_len=_int32(ends - (pages - 1) * page_size),
        samples=tuple(samples.tolist()),
        scores=tuple(scores.tolist()),
        sampling=prepare(
            sampled.rows, sampled.count_from(ends + 1 - samples), None if step.masks is None else _masks(sampled)
        ),
        targets=torch.from_numpy(np.fromiter(chain.from_iterable(known), np.int64, len(scored.rows))),
        tops=(*map(attrgetter("sampling.logprobs"), sampled.rows), *map(attrgetter("targets_top"), scored.rows)),
    )


@dataclass(frozen=True, slots=True)
class _Owned:
    """Logit rows that belong to rows of the step, some to each: ``rows[j]`` = step's ``owners[j]``-th, of whose
    ``offsets[j]``-th logit row it is."""

    rows: Sequence[Row]
    owners: np.ndarray
    offsets: np.ndarray

    @classmethod
    def by(cls, rows: Sequence[Row], counts: np.ndarray) -> "_Owned":
        owners = np.repeat(np.arange(len(rows)), counts)
        offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        return cls(list(map(rows.__getitem__, owners.tolist())), owners, offsets)

    def count_from(self, begins: np.ndarray) -> np.ndarray:
        """``begins[i], begins[i] + 1, …`` for the logit rows of row i."""
        counted: np.ndarray = begins[self.owners] + self.offsets
        return counted


def _masks(sampled: _Owned) -> np.ndarray:
    """The bitmask's row of each logit row that is sampled, -1 where there is none."""
    firsts = zip(map(attrgetter("mask"), sampled.rows), sampled.offsets.tolist(), strict=True)
    return _integers([-1 if first is None else first + offset for first, offset in firsts])


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.fromiter(values, np.int64, len(values))


def _lengths(values: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.fromiter(map(len, values), np.int64, len(values))


def _pointers(counts: np.ndarray) -> np.ndarray:
    """Where each of so many begins, and where the last ends."""
    pointers = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=pointers[1:])
    return pointers


def _padded(values: np.ndarray, smallest: int) -> Tensor:
    missing = smallest - len(values)
    return torch.from_numpy(values if missing <= 0 else np.concatenate((values, np.zeros(missing, np.int64))))


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
