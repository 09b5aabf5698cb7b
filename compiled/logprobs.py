"""Log-probabilities of known tokens under the raw logits: what is reported, not what is drawn from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled.step import LOWEST_LOGPROB, Logprob

_ROWS_AT_ONCE = 16


def logprobs(logits_RV: Tensor, tokens_R: Tensor, tops: Sequence[int | None]) -> list[Logprob | None]:
    """For each row the token's own, and the ``tops[i]`` likeliest ones; None where that is None. NaN counts as -inf."""
    found: list[Logprob | None] = [None] * len(tops)
    asked = [i for i, top in enumerate(tops) if top is not None]
    for start in range(0, len(asked), _ROWS_AT_ONCE):
        few = asked[start : start + _ROWS_AT_ONCE]
        told = _few(logits_RV[few].float(), tokens_R[few, None], [tops[i] or 0 for i in few])
        for i, logprob in zip(few, told, strict=True):
            found[i] = logprob
    return found


def _few(logits_NV: Tensor, tokens_N1: Tensor, top_N: Sequence[int]) -> list[Logprob]:
    return tell(*measure(logits_NV, tokens_N1, max(top_N)), top_N)


def measure(logits_NV: Tensor, tokens_N1: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """What is to be told: ids (token, rank, then the ``most`` likeliest ones, int64) and log-probabilities (the
    token's, then theirs), a row each."""
    all_NV = logits_NV.log_softmax(dim=-1).nan_to_num(nan=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)
    own_N1 = all_NV.gather(1, tokens_N1)
    ranks_N1 = (all_NV > own_N1).sum(dim=-1, keepdim=True) + 1
    best = all_NV.topk(min(most, all_NV.shape[1]), dim=-1)
    return torch.cat([tokens_N1, ranks_N1, best.indices], dim=1), torch.cat([own_N1, best.values], dim=1)


def tell(ids: Tensor, values: Tensor, top_N: Sequence[int]) -> list[Logprob]:
    """What was measured, on the host."""
    return [
        Logprob(token, own, rank, tuple(zip(likeliest[:top], theirs[:top], strict=True)))
        for (token, rank, *likeliest), (own, *theirs), top in zip(ids.tolist(), values.tolist(), top_N, strict=True)
    ]
