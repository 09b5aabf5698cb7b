"""Probabilities → tokens: truncation, then one draw by the inverse of the cumulated distribution.

Draws go through the vocabulary in its own order, so that a last bit of the logits cannot swap two tokens' shares of
the random numbers. Sums that decide are float64 and sequential or of a fixed shape: rows that are computed with wider
ones get the same bits.
"""

import numpy as np
import torch
from torch import Tensor

from compiled.sampling_batch import Kind, Part

_BLOCK = 256
"""Neighbouring ids whose mass is summed before any of them is looked at."""

_NARROW = 1024
"""Rows with more candidates than this are cut apart from the others, so that only they take long."""

_MARGIN = 1e-5
"""More than the rounding of a float32 softmax's sum."""


def draw(probs_NV: Tensor, part: Part) -> Tensor:
    """One token id per row. Rows sum to 1."""
    uniform_N = torch.from_numpy(part.uniform)
    return draw_whole(probs_NV, uniform_N) if part.kind is Kind.WHOLE else _draw_cut(probs_NV, uniform_N, part)


def draw_whole(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """From the whole distribution: first a block of ids, then one of its ids."""
    vocabulary = probs_NV.shape[1]
    whole = vocabulary // _BLOCK * _BLOCK
    mass_NB = probs_NV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1) if whole else probs_NV[:, :0]
    if whole < vocabulary:
        mass_NB = torch.cat([mass_NB, probs_NV[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    sums_NB = mass_NB.cumsum(dim=-1, dtype=torch.float64)
    target_N = uniform_N * sums_NB[:, -1]
    block_N1 = find(mass_NB, sums_NB, target_N)
    before_N = (sums_NB.gather(1, block_N1) - mass_NB.gather(1, block_N1)).squeeze(1)
    ids_NK = block_N1 * _BLOCK + torch.arange(_BLOCK, device=probs_NV.device)
    inside_NK = ids_NK < vocabulary
    mass_NK = probs_NV.gather(1, ids_NK.clamp(max=vocabulary - 1)) * inside_NK
    return ids_NK.gather(1, find(mass_NK, mass_NK.cumsum(dim=-1, dtype=torch.float64), target_N - before_N)).squeeze(1)


def find(mass_NK: Tensor, sums_NK: Tensor, target_N: Tensor) -> Tensor:
    """Index ``[N, 1]`` of the entry in whose share of the cumulated mass the target falls; never one without mass."""
    found_N1 = torch.searchsorted(sums_NK, target_N.clamp(min=0)[:, None], right=True)
    # A target that rounds up to the whole mass belongs to the last entry that has any.
    last_N1 = mass_NK.shape[1] - 1 - (mass_NK > 0).to(torch.uint8).flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(found_N1, last_N1)


def _draw_cut(probs_NV: Tensor, uniform_N: Tensor, part: Part) -> Tensor:
    """From what the row's options leave: only candidates are sorted, a few dozen ids as a rule."""
    vocabulary = probs_NV.shape[1]
    found = np.flatnonzero(probs_NV.numpy() >= _floor(probs_NV, part).numpy()[:, None])
    owners = found // vocabulary
    reach = _in_reach(probs_NV.numpy().reshape(-1)[found], owners, part)
    found, owners = found[reach], owners[reach]
    counts = np.bincount(owners, minlength=len(probs_NV))
    tokens_N = torch.empty(len(counts), dtype=torch.int64)
    for together in (counts <= _NARROW, counts > _NARROW):
        rows = together.nonzero()[0]
        if len(rows):
            places_MK = np.zeros((len(rows), counts[rows].max()), np.int64)
            real_MK = np.arange(places_MK.shape[1]) < counts[rows][:, None]
            places_MK[real_MK] = found[together[owners]]
            mass_MK = probs_NV.take(torch.from_numpy(places_MK)) * torch.from_numpy(real_MK)
            mass_MK = mass_MK * _kept(mass_MK, part, rows)
            sums_MK = mass_MK.cumsum(dim=-1, dtype=torch.float64)
            index_M1 = find(mass_MK, sums_MK, uniform_N[rows] * sums_MK[:, -1])
            tokens_N[rows] = torch.from_numpy(places_MK).gather(1, index_M1).squeeze(1) % vocabulary
    return tokens_N


def _in_reach(mass: np.ndarray, owners: np.ndarray, part: Part) -> np.ndarray:
    """Which candidates top_p may keep, to within a factor of two: the rest need not be sorted."""
    rows = len(part.rows)
    binade = mass.view(np.int32) >> 23  # a float's exponent
    sums = np.bincount(owners << 8 | binade, weights=mass, minlength=rows << 8).reshape(rows, 256)
    limit = np.where(_of_whole(part), part.top_p * (1 + 1e-9), np.inf)
    reached = sums[:, ::-1].cumsum(axis=1) >= limit[:, None]
    lowest = np.where(reached.any(axis=1), 255 - reached.argmax(axis=1), 0)
    return binade >= lowest[owners]


def _of_whole(part: Part) -> np.ndarray:
    """Rows whose top_p is a share of the whole distribution, not of what min_p and top_k left."""
    return (part.top_k == 0) & (part.min_p == 0)


def _floor(probs_NV: Tensor, part: Part) -> Tensor:
    """A probability under which no token of the row is kept, and for min_p exactly the lowest that is."""
    vocabulary = probs_NV.shape[1]
    top_N = probs_NV.amax(dim=-1)
    floor_N = top_N * torch.from_numpy(part.min_p).float()
    # Ids below this have together less than what top_p may leave out.
    nucleus = np.where(_of_whole(part), (1 - part.top_p) / 2 - _MARGIN, 0).clip(0) / vocabulary
    floor_N = torch.maximum(floor_N, torch.from_numpy(nucleus).float())
    few = (part.top_k > 0) & (part.top_k <= vocabulary // 8)
    if few.any():
        # Of the highest of many groups, the k-th highest: at least k ids reach it.
        top_k = np.where(few, part.top_k, 1).astype(np.int64)
        most = int(top_k.max())
        groups = max(4 * most, min(_BLOCK, vocabulary // 2))
        highest_NG = probs_NV[:, : vocabulary // groups * groups].unflatten(1, (-1, groups)).amax(dim=1)
        kth_N = highest_NG.topk(most).values.gather(1, torch.from_numpy(top_k - 1)[:, None]).squeeze(1)
        floor_N = torch.where(torch.from_numpy(few), torch.maximum(floor_N, kth_N), floor_N)
    return floor_N


def _kept(mass_MK: Tensor, part: Part, rows: np.ndarray) -> Tensor:
    """Which candidates remain after top_k, top_p and typical_p, as a mask. Equals go in the vocabulary's order."""
    top_k_M, top_p_M, typical_M, whole_M = (
        torch.from_numpy(option[rows]) for option in (part.top_k, part.top_p, part.typical_p, _of_whole(part))
    )
    sorted_MK, order_MK = mass_MK.sort(dim=-1, descending=True, stable=True)
    kept_MK = keep(sorted_MK, top_k_M, top_p_M, typical_M if bool((typical_M < 1).any()) else None, whole_M)
    return torch.zeros_like(kept_MK).scatter_(1, order_MK, kept_MK)


def keep(sorted_MK: Tensor, top_k_M: Tensor, top_p_M: Tensor, typical_M: Tensor | None, whole_M: Tensor) -> Tensor:
    """The same of candidates that are sorted already, the likeliest first. ``whole_M``: top_p is a share of the whole
    distribution; ``typical_M`` is None where no row has a typical_p."""
    rank_K = torch.arange(sorted_MK.shape[1], device=sorted_MK.device)
    kept_MK = sorted_MK.double() * ((rank_K < top_k_M[:, None]) | (top_k_M == 0)[:, None])
    sums_MK = kept_MK.cumsum(dim=-1)
    total_M = torch.where(whole_M, 1.0, sums_MK[:, -1])
    kept_MK = kept_MK * _until(sums_MK - kept_MK, top_p_M, total_M)
    if typical_M is not None:
        share_MK = kept_MK / kept_MK.cumsum(dim=-1)[:, -1:]
        surprise_MK = torch.where(share_MK > 0, -share_MK.log(), 0.0)
        entropy_M1 = (share_MK * surprise_MK).cumsum(dim=-1)[:, -1:]
        distance_MK = torch.where(share_MK > 0, (surprise_MK - entropy_M1).abs(), torch.inf)
        nearest_MK = distance_MK.argsort(dim=-1, stable=True)
        near_MK = share_MK.gather(1, nearest_MK)
        near_MK = near_MK * _until(near_MK.cumsum(dim=-1) - near_MK, typical_M, torch.ones_like(typical_M))
        kept_MK = torch.zeros_like(near_MK).scatter_(1, nearest_MK, near_MK)
    return kept_MK > 0


def _until(before_MK: Tensor, limit_M: Tensor, total_M: Tensor) -> Tensor:
    """Whether the mass before an entry is still under the limit; the first one always stays. A limit of 1 is none."""
    reached_M = torch.where(limit_M < 1, limit_M * total_M, torch.inf)
    first_K = torch.arange(before_MK.shape[1], device=before_MK.device) == 0
    return (before_MK < reached_M[:, None]) | first_K
