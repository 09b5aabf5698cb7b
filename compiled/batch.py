"""A `Step` → the tensors that one forward pass takes.

```
rows      A A A | B | C C          a prompt's chunk, a decoding row, another chunk
ids       . . .   .   . .          T tokens, flattened
qo_indptr 0       3   4   6        where each row's tokens begin
kv_indptr 0       n_A …            where each row's pages begin in kv_indices
rows_R        2   3                index of the last token of each row that samples
```
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled.step import Sampling, Step


@dataclass(frozen=True)
class Batch:
    """Inputs of one step.

    ``ids_T``, ``positions_T`` (int64) and ``rows_R`` are padded to at least the compiled minimum; the
    index arrays (int32, FlashInfer's paged layout) cover the real tokens only. ``sampled[i]`` is the
    index in ``step.rows`` of the i-th of the first ``len(sampled)`` logit rows, ``draw_at`` the position
    of the token that it draws.
    """

    ids_T: Tensor
    positions_T: Tensor
    rows_R: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    sampled: tuple[int, ...]
    samplings: tuple[Sampling, ...]
    draw_at: Tensor


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
    sampled = [i for i, row in enumerate(rows) if row.sampling is not None]
    logit_rows = np.zeros(max(len(sampled), smallest), np.int64)
    logit_rows[: len(sampled)] = first[1:][sampled] - 1
    return Batch(
        ids_T=torch.from_numpy(ids),
        positions_T=torch.from_numpy(positions),
        rows_R=torch.from_numpy(logit_rows),
        qo_indptr=_int32(first),
        kv_indptr=_int32(np.concatenate(([0], np.cumsum(pages)))),
        kv_indices=torch.tensor(indices, dtype=torch.int32),
        kv_last_page_len=_int32(ends - (pages - 1) * page_size),
        sampled=tuple(sampled),
        samplings=tuple(row.sampling for row in rows if row.sampling is not None),
        draw_at=torch.from_numpy(ends[sampled]),
    )


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
