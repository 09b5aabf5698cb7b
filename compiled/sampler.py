"""Logits → tokens, vectorised over rows.

Order: float32 → greedy rows by argmax; the others: temperature → min_p → top_k → top_p → one draw by the
inverse of the cumulated distribution in vocabulary order. The random number of a draw depends on
(seed, position) alone, so a row's token does not depend on its batch mates, on how the prompt was
chunked, or on how often the request was preempted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled.step import Sampling

_WORD = 0xFFFFFFFF
_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)


def sample(logits_RV: Tensor, samplings: Sequence[Sampling], draw_at_R: Tensor) -> Tensor:
    """One token id per row (int64). ``draw_at_R`` is the position that each token will have."""
    logits_RV = logits_RV.float()
    tokens_R = logits_RV.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn)
        chosen = [samplings[row] for row in drawn]
        seeds = torch.tensor([sampling.seed for sampling in chosen])
        tokens_R[rows] = _draw(probabilities(logits_RV[rows], chosen), uniform(seeds, draw_at_R[rows]))
    return tokens_R


def probabilities(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What each row is drawn from: float32, not normalised after truncation. Temperatures are above 0."""
    scaled_RV = logits_RV / _column([sampling.temperature for sampling in samplings])
    probs_RV = scaled_RV.softmax(dim=-1)
    if any(sampling.min_p > 0 for sampling in samplings):
        floor = probs_RV.amax(dim=-1, keepdim=True) * _column([sampling.min_p for sampling in samplings])
        probs_RV = probs_RV.masked_fill(probs_RV < floor, 0.0)
    truncated = [i for i, sampling in enumerate(samplings) if sampling.top_k > 0 or sampling.top_p < 1]
    if truncated:
        rows = torch.tensor(truncated)
        probs_RV[rows] = _truncate(probs_RV[rows], [samplings[i] for i in truncated])
    return probs_RV


def _truncate(probs_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Keep the ``top_k`` likeliest tokens, and of these the fewest whose share of the mass reaches ``top_p``."""
    vocabulary = probs_RV.shape[-1]
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings])
    sorted_RV = sorted_RV.masked_fill(torch.arange(vocabulary) >= top_k[:, None], 0.0)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    limit = _column([sampling.top_p for sampling in samplings]) * sorted_RV.sum(dim=-1, keepdim=True)
    # A token stays while the mass before it is under the limit; the likeliest always stays.
    sorted_RV = sorted_RV.masked_fill((before_RV >= limit) & (before_RV > 0), 0.0)
    return torch.zeros_like(probs_RV).scatter_(1, order_RV, sorted_RV)


def _draw(probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token in whose slice of the cumulated mass the random number falls."""
    mass_RV = probs_RV.double().cumsum(dim=-1)
    target_R1 = (uniform_R * mass_RV[:, -1])[:, None]
    tokens_R = torch.searchsorted(mass_RV, target_R1, right=True).squeeze(1)
    # A target that rounds up to the whole mass belongs to the last token that has any.
    last_R = (probs_RV > 0).to(torch.uint8).flip(-1).argmax(dim=-1)
    return torch.minimum(tokens_R, probs_RV.shape[-1] - 1 - last_R)


def uniform(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (seed, position): Philox4x32-10 keyed by the seed, counting positions.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). In int64 arithmetic, so
    that every device gives the same number.
    """
    counter = [positions_R & _WORD, (positions_R >> 32) & _WORD, torch.zeros_like(seeds_R), torch.zeros_like(seeds_R)]
    key = [seeds_R & _WORD, (seeds_R >> 32) & _WORD]
    for _ in range(10):
        high0, low0 = _multiply(counter[0], _PHILOX_M[0])
        high1, low1 = _multiply(counter[2], _PHILOX_M[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + _PHILOX_W[0]) & _WORD, (key[1] + _PHILOX_W[1]) & _WORD]
    mantissa = ((counter[0] >> 5) << 26) | (counter[1] >> 6)
    return mantissa.double() / 2**53


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32-bit product; the int64 product may wrap, its bits are right."""
    product = value * factor
    return (product >> 32) & _WORD, product & _WORD


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]
