"""Logits → tokens, vectorised over rows. `compiled.step.Sampling` says in which order.

Every number of a row comes from that row alone, by operations that treat rows alike and that padding does not change:
a row's token depends neither on its batch mates, nor on how the prompt was chunked, nor on how often the request was
preempted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled.bars import bar
from compiled.draw import draw
from compiled.sampling_batch import Edits, Kind, Part
from compiled.step import Masks

ADDENDS = torch.tensor([[0.0 if byte >> bit & 1 else -torch.inf for bit in range(8)] for byte in range(256)])
"""A byte of a bitmask → what is added to eight logits."""

_LARGEST = 1e30
"""Stands for an infinite logit: divided by the smallest temperature it is still finite."""


def sample(logits_RV: Tensor, parts: Sequence[Part], masks: Masks | None = None) -> tuple[Tensor, int]:
    """One token id per row (int64), and how many rows had a NaN where one mattered: such a logit counts as -inf.

    ``logits_RV`` is only read. Where a row has no usable logit, all ids that it may give are equal.
    """
    bits_MB = None if masks is None else np.frombuffer(masks.wait(), np.uint8).reshape(-1, 4 * masks.words)
    tokens = np.empty(len(logits_RV), np.int64)
    broken = 0
    for part in parts:
        grammars = _Grammars.of(part, bits_MB)
        chosen_N = _choose(_edited(logits_RV, part), part, grammars)
        if chosen_N is None:
            raw_NV, edited_NV = _raw(logits_RV, part), _edited(logits_RV, part)
            broken += int(raw_NV.isnan().any(dim=-1).sum())
            others_NV = None if part.edits is None else _others(part.edits, edited_NV)
            bars_NV = None if grammars is None else grammars.bars(raw_NV.shape[1])
            chosen_N = _choose(rescue(raw_NV, _bar(edited_NV, bars_NV), others_NV, bars_NV), part)
            assert chosen_N is not None, "rescued rows have a finite maximum"
        tokens[part.rows] = chosen_N
    return torch.from_numpy(tokens), broken


def _raw(logits_RV: Tensor, part: Part, *, copy: bool = False) -> Tensor:
    """A part's logits in float32, in memory of their own where ``copy`` says so."""
    first, last = int(part.rows[0]), int(part.rows[-1])
    adjacent = last - first + 1 == len(part.rows)
    raw_NV = logits_RV[first : last + 1] if adjacent else logits_RV.index_select(0, torch.from_numpy(part.rows))
    return raw_NV.to(torch.float32, copy=copy)


def _edited(logits_RV: Tensor, part: Part) -> Tensor:
    """The same, edited but for what grammars bar; memory of its own where it is to be written to."""
    if part.edits is None:
        return _raw(logits_RV, part)
    logits_NV = _raw(logits_RV, part, copy=part.edits.lists)
    return edit(logits_NV, part.edits) if part.edits.lists else logits_NV


@dataclass(frozen=True, slots=True)
class _Grammars:
    """Which tokens the rows of a part may give: the i-th those of row ``masks[i]`` of ``bits``; all, where that is
    -1."""

    masks: np.ndarray
    bits: np.ndarray

    @classmethod
    def of(cls, part: Part, bits_MB: np.ndarray | None) -> "_Grammars | None":
        masks = None if part.edits is None else part.edits.masks
        return None if masks is None or bits_MB is None else cls(masks, bits_MB)

    def refused(self, tokens: np.ndarray) -> np.ndarray:
        """Which rows may not give their token."""
        (rows,) = (self.masks >= 0).nonzero()
        tokens = tokens[rows]
        allowed = self.bits[self.masks[rows], tokens >> 3] >> (tokens & 7) & 1
        return rows[allowed == 0]

    def bars(self, vocabulary: int) -> Tensor:
        masks, bits = torch.from_numpy(self.masks), torch.tensor(self.bits)
        return bars(masks, bits, ADDENDS, vocabulary, partial=bool(self.masks.min() < 0))


def _choose(logits_NV: Tensor, part: Part, grammars: _Grammars | None = None) -> np.ndarray | None:
    """Tokens, or None where a row has no finite maximum."""
    if part.kind is Kind.GREEDY:
        return _highest(logits_NV, grammars)
    scaled_NV = logits_NV / torch.from_numpy(part.temperature).float()[:, None]
    if grammars is not None:
        bar(scaled_NV.numpy(), grammars.masks, grammars.bits)
    probs_NV = scaled_NV.softmax(dim=-1)
    return None if bool(probs_NV[:, 0].isnan().any()) else draw(probs_NV, part).numpy()


def _highest(logits_NV: Tensor, grammars: _Grammars | None = None) -> np.ndarray | None:
    """The same without a draw. Most often a grammar allows what the model likes best, and there is nothing to bar: then
    the highest of all is the highest of the allowed, and the first of equals among them too."""
    # numpy's argmax is ten times as fast as torch's. Both stop at the first of equals, and at a NaN.
    logits = logits_NV.numpy()
    highest = logits.argmax(axis=-1)
    if not np.isfinite(logits[np.arange(len(logits)), highest]).all():
        return None
    if grammars is not None and len(rows := grammars.refused(highest)):
        of_rows = logits_NV[rows]
        bar(of_rows.numpy(), grammars.masks[rows], grammars.bits)
        again = _highest(of_rows)
        if again is None:
            return None
        highest[rows] = again
    return highest


def edit(logits_NV: Tensor, edits: Edits) -> Tensor:
    """Apply ``edits`` in place, but for what grammars bar."""
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
    return logits_NV


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
    """What is barred is -inf, or NaN where it was NaN or infinite, which is no better."""
    return logits_NV if bars_NV is None else logits_NV + bars_NV


def usable(logits_NV: Tensor) -> Tensor:
    """NaN counts as -inf, and infinity as a very large number."""
    return logits_NV.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
