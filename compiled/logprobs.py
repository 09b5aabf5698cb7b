"""Log-probabilities of known tokens under the raw logits: what is reported, not what is drawn from."""

from collections.abc import Sequence

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
    all_NV = logits_NV.log_softmax(dim=-1).nan_to_num(nan=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)
    own_N1 = all_NV.gather(1, tokens_N1)
    ranks = ((all_NV > own_N1).sum(dim=-1) + 1).tolist()
    best = all_NV.topk(min(max(top_N), all_NV.shape[1]), dim=-1)
    rows = zip(tokens_N1[:, 0].tolist(), own_N1[:, 0].tolist(), ranks, top_N, strict=True)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Logprob(token, own, rank, tuple(zip(ids[:top], values[:top], strict=True)))
        for (token, own, rank, top), (ids, values) in zip(rows, tops, strict=True)
    ]
