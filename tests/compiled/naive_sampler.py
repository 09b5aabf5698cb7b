"""The sampler's oracle: one row at a time, in plain Python, in the order that `compiled.step.Sampling` gives."""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from compiled.philox import uniform
from compiled.step import Row, Sampling

NUDGES = (0.0, 2e-6, -2e-6)
"""Where a limit falls between two tokens within float32's rounding, both are right."""


def right_tokens(logits: Sequence[float], row: Row, position: int) -> set[int]:
    """The tokens that row's draw at ``position`` may give."""
    sampling = row.sampling
    assert sampling is not None
    edited = rescued(logits, edit(logits, sampling, row.history[:position], row.prompt_length), sampling)
    if sampling.temperature == 0:
        return {max(range(len(edited)), key=lambda token: (edited[token], -token))}
    number = float(uniform(np.array([sampling.seed]), np.array([position]))[0])
    cut = [probabilities(edited, sampling, 1 + nudge) for nudge in NUDGES]
    return {draw(probs, number + shift) for probs in cut for shift in NUDGES}


def edit(logits: Sequence[float], sampling: Sampling, history: tuple[int, ...], prompt_length: int) -> list[float]:
    edited = [np.float32(logit) for logit in logits]
    barred: set[int] = set()
    if sampling.allowed_token_ids:
        barred |= set(range(len(edited))) - set(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        if (*history, word[-1])[-len(word) :] == word:
            barred.add(word[-1])
    answer = history[prompt_length:]
    if len(answer) < sampling.min_tokens:
        barred |= set(sampling.barred_token_ids)
    for token in barred:
        edited[token] = np.float32("-inf")
    for token, addend in sampling.logit_bias:
        edited[token] += np.float32(addend)
    repetition = np.float32(sampling.repetition_penalty)
    for token in set(history):
        edited[token] = edited[token] / repetition if edited[token] > 0 else edited[token] * repetition
    for token, count in Counter(answer).items():
        edited[token] -= np.float32(sampling.presence_penalty + sampling.frequency_penalty * count)
    return [float(logit) for logit in edited]


def rescued(logits: Sequence[float], edited: list[float], sampling: Sampling) -> list[float]:
    allowed = sampling.allowed_token_ids or range(len(logits))
    for candidate in (edited, [logit if i in allowed else -math.inf for i, logit in enumerate(logits)]):
        usable = [-math.inf if math.isnan(logit) else min(logit, 1e30) for logit in candidate]
        if max(usable) > -math.inf:
            return usable
    return [0.0 if i in allowed else -math.inf for i in range(len(logits))]


def probabilities(logits: Sequence[float], sampling: Sampling, nudge: float = 1.0) -> list[float]:
    """Zero where truncated; not normalised after that. ``nudge`` is a factor on every limit."""
    top = max(logits)
    weights = [math.exp((logit - top) / sampling.temperature) for logit in logits]
    probs = [weight / math.fsum(weights) for weight in weights]
    floor = sampling.min_p * max(probs) * nudge
    kept = [token for token in range(len(probs)) if probs[token] >= min(floor, max(probs)) and probs[token] > 0]
    kept.sort(key=lambda token: (-probs[token], token))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        whole = math.fsum(probs[token] for token in kept) if sampling.top_k or sampling.min_p else 1.0
        kept = until([(probs[token], token) for token in kept], sampling.top_p * whole * nudge)
    if sampling.typical_p < 1:
        whole = math.fsum(probs[token] for token in kept)
        shares = {token: probs[token] / whole for token in kept}
        entropy = -math.fsum(share * math.log(share) for share in shares.values())
        near = sorted(kept, key=lambda token: abs(-math.log(shares[token]) - entropy))
        kept = until([(shares[token], token) for token in near], sampling.typical_p * nudge)
    left = set(kept)
    return [prob if token in left else 0.0 for token, prob in enumerate(probs)]


def until(ranked: list[tuple[float, int]], limit: float) -> list[int]:
    """The first tokens whose mass reaches ``limit``; at least one."""
    kept: list[int] = []
    mass = 0.0
    for share, token in ranked:
        if kept and mass >= limit:
            break
        kept.append(token)
        mass += share
    return kept


def draw(probs: Sequence[float], number: float) -> int:
    """The inverse of the cumulated distribution, in the order of the vocabulary."""
    sums = list(itertools.accumulate(probs))
    found = bisect.bisect_right(sums, max(number, 0.0) * sums[-1])
    return min(found, max(token for token, prob in enumerate(probs) if prob > 0))
