"""A `Step` → the tensors that one forward pass takes.

```
rows      A A A | B | C C          a prompt's chunk, a decoding row, another chunk
ids       . . .   .   . .          T tokens, flattened
qo_indptr 0       3   4   6        where each row's tokens begin
kv_indptr 0       n_A …            where each row's pages begin in kv_indices
rows_R        2   3                index of the tokens whose logits are wanted: first those that a token is
                                   sampled after, then those whose next token is known and scored
```
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled.sampling_batch import Part, prepare
from compiled.step import Step


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
    rows = step.rows
    lengths = np.fromiter((len(row.tokens) for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    ends = starts + lengths
    pages = -(-ends // page_size)
    first = np.concatenate(([0], np.cumsum(lengths)))
    total = int(first[-1])
    ids = np.zeros(max(total, smallest), np.int64)
    ids[:total] = np.fromiter((token for row in rows for token in row.tokens), np.int64, total)
    positions = np.zeros(max(total, smallest), np.int64)
    positions[:total] = np.arange(total) - np.repeat(first[:-1] - starts, lengths)
    indices = [page for row, count in zip(rows, pages, strict=True) for page in row.pages[:count]]
    samples = np.fromiter((0 if row.sampling is None else 1 + row.drafts for row in rows), np.int64, len(rows))
    scores = np.fromiter((len(row.targets) for row in rows), np.int64, len(rows))
    wanted = np.concatenate((_runs(first[1:] - samples, samples), _runs(first[:-1], scores)))
    logit_rows = np.zeros(max(len(wanted), smallest), np.int64)
    logit_rows[: len(wanted)] = wanted
    owners = [row for row in rows if row.sampling is not None for _ in range(1 + row.drafts)]
    targets = np.fromiter((token for row in rows for token in row.targets), np.int64, len(wanted) - len(owners))
    return Batch(
        ids_T=torch.from_numpy(ids),
        positions_T=torch.from_numpy(positions),
        rows_R=torch.from_numpy(logit_rows),
        qo_indptr=_int32(first),
        kv_indptr=_int32(np.concatenate(([0], np.cumsum(pages)))),
        kv_indices=torch.tensor(indices, dtype=torch.int32),
        kv_last_page_len=_int32(ends - (pages - 1) * page_size),
        samples=tuple(samples.tolist()),
        scores=tuple(scores.tolist()),
        sampling=prepare(owners, _runs(ends + 1 - samples, samples), _masks(step)),
        targets=torch.from_numpy(targets),
        tops=(
            *(None if row.sampling is None else row.sampling.logprobs for row in owners),
            *(row.targets_top for row in rows for _ in row.targets),
        ),
    )


def _masks(step: Step) -> np.ndarray | None:
    """The bitmask's row of each row that is sampled, -1 where there is none."""
    if step.masks is None:
        return None
    rows = (row for row in step.rows if row.sampling is not None)
    return np.array([-1 if row.mask is None else row.mask + i for row in rows for i in range(1 + row.drafts)])


def _runs(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``begins[i], begins[i] + 1, …``, ``counts[i]`` of them, for each i."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) + np.repeat(begins - (ends - counts), counts)


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
