"""Logits → tokens, vectorised over rows. `compiled.step.Sampling` says in which order.

Every number of a row comes from that row alone, by operations that treat rows alike and that padding does not change:
a row's token depends neither on its batch mates, nor on how the prompt was chunked, nor on how often the request was
preempted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled.draw import draw
from compiled.sampling_batch import Edits, Kind, Part
from compiled.step import Masks

ADDENDS = torch.tensor([[0.0 if byte >> bit & 1 else -torch.inf for bit in range(8)] for byte in range(256)])
"""A byte of a bitmask → what is added to eight logits. On a CPU looking these up and adding them is eight times as
fast as filling or choosing by a mask of booleans."""

_LARGEST = 1e30
"""Stands for an infinite logit: divided by the smallest temperature it is still finite."""


def sample(logits_RV: Tensor, parts: Sequence[Part], masks: Masks | None = None) -> tuple[Tensor, int]:
    """One token id per row (int64), and how many rows had a NaN where one mattered: such a logit counts as -inf.

    ``logits_RV`` is only read. Where a row has no usable logit, all ids that it may give are equal.
    """
    bits = None if masks is None else torch.frombuffer(masks.wait(), dtype=torch.uint8).view(-1, 4 * masks.words)
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64)
    broken = 0
    for part in parts:
        rows_N = torch.from_numpy(part.rows)
        first, last = int(part.rows[0]), int(part.rows[-1])
        adjacent = last - first + 1 == len(rows_N)
        raw_NV = (logits_RV[first : last + 1] if adjacent else logits_RV.index_select(0, rows_N)).float()
        bars_NV = None
        if bits is not None and part.edits is not None and part.edits.masks is not None:
            rows = part.edits.masks
            bars_NV = bars(torch.from_numpy(rows), bits, ADDENDS, raw_NV.shape[1], partial=bool(rows.min() < 0))
        edited_NV = raw_NV if part.edits is None else edit(raw_NV.clone(), part.edits, bars_NV)
        chosen_N = _choose(edited_NV, part)
        if chosen_N is None:
            broken += int(raw_NV.isnan().any(dim=-1).sum())
            others_NV = None if part.edits is None else _others(part.edits, edited_NV)
            chosen_N = _choose(rescue(raw_NV, edited_NV, others_NV, bars_NV), part)
            assert chosen_N is not None, "rescued rows have a finite maximum"
        tokens_R[rows_N] = chosen_N
    return tokens_R, broken


def _choose(logits_NV: Tensor, part: Part) -> Tensor | None:
    """Tokens, or None where a row has no finite maximum."""
    if part.kind is Kind.GREEDY:
        # numpy's argmax is ten times as fast as torch's. Both stop at the first of equals, and at a NaN.
        chosen_N = torch.from_numpy(logits_NV.numpy().argmax(axis=-1))
        return chosen_N if bool(logits_NV.gather(1, chosen_N[:, None]).isfinite().all()) else None
    probs_NV = (logits_NV / torch.from_numpy(part.temperature).float()[:, None]).softmax(dim=-1)
    return None if bool(probs_NV[:, 0].isnan().any()) else draw(probs_NV, part)


def edit(logits_NV: Tensor, edits: Edits, bars_NV: Tensor | None = None) -> Tensor:
    """Apply ``edits`` in place, and last bar what a grammar bars."""
    vocabulary = logits_NV.shape[1]
    flat = logits_NV.numpy().reshape(-1)
    if (others_NV := _others(edits, logits_NV)) is not None:
        logits_NV.masked_fill_(others_NV, -torch.inf)
    if edits.barred is not None:
        flat[edits.barred.flat(vocabulary)[0]] = -np.inf
    if edits.bias is not None:
        at, (addend,) = edits.bias.flat(vocabulary)
        np.add.at(flat, at, addend)
    if edits.seen is not None:
        at, (repetition, subtracted) = edits.seen.flat(vocabulary)
        logits = flat[at]
        flat[at] = np.where(logits > 0, logits / repetition, logits * repetition) - subtracted
    return _bar(logits_NV, bars_NV)


def _others(edits: Edits, logits_NV: Tensor) -> Tensor | None:
    """All but the allowed ids, in rows that have such."""
    if edits.allowed is None:
        return None
    at, _ = edits.allowed.flat(logits_NV.shape[1])
    return others(torch.from_numpy(np.unique(at // logits_NV.shape[1])), torch.from_numpy(at), logits_NV)


def others(rows_M: Tensor, at_E: Tensor, logits_NV: Tensor) -> Tensor:
    """A mask ``[N, V]`` of all but the places ``at_E``, in the rows ``rows_M``."""
    others_NV = torch.zeros(logits_NV.shape, dtype=torch.bool, device=logits_NV.device)
    others_NV.index_fill_(0, rows_M, True)
    others_NV.view(-1).index_fill_(0, at_E, False)
    return others_NV


def rescue(raw_NV: Tensor, edited_NV: Tensor, others_NV: Tensor | None, bars_NV: Tensor | None) -> Tensor:
    """Logits with a finite maximum in every row. Rows that have one already stay as they are.

    NaN becomes -inf. Where the edits left nothing, the raw logits of the allowed ids count; where these say nothing
    either, all allowed ids are equal. A grammar bars its tokens all the same, even if none of the allowed is left.
    ``others_NV`` are those that are not allowed.
    """
    logits_NV, every = usable(edited_NV), [usable(raw_NV), torch.zeros_like(raw_NV)]
    some = [] if others_NV is None else [weaker_NV.masked_fill(others_NV, -torch.inf) for weaker_NV in every]
    for weaker_NV in some + every:
        nothing_N1 = logits_NV.amax(dim=-1, keepdim=True) == -torch.inf
        logits_NV = torch.where(nothing_N1, _bar(weaker_NV, bars_NV), logits_NV)
    return logits_NV


def bars(masks_N: Tensor, bits: Tensor, addends: Tensor, vocabulary: int, *, partial: bool) -> Tensor:
    """``[N, vocabulary]``: -inf for ids that a row's grammar bars, 0 for the others. ``masks_N`` are rows of the bytes
    ``bits``; where it is ``partial``, -1 for rows without a grammar."""
    of_rows = bits.index_select(0, masks_N.clamp(min=0)).int()
    bars_NV = torch.nn.functional.embedding(of_rows, addends).flatten(1)[:, :vocabulary]
    return bars_NV.masked_fill_((masks_N < 0)[:, None], 0) if partial else bars_NV


def _bar(logits_NV: Tensor, bars_NV: Tensor | None) -> Tensor:
    """In place. What is barred is -inf, or NaN where it was NaN or infinite, which is no better."""
    return logits_NV if bars_NV is None else logits_NV.add_(bars_NV)


def usable(logits_NV: Tensor) -> Tensor:
    """NaN counts as -inf, and infinity as a very large number."""
    return logits_NV.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
