"""Which peer computes a prompt, and whether it is worth it. Pure."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import ceil

LOAD_BOUND = 1.25
"""A peer takes at most so many times its share of what is under way."""

WORTH = 2.0
"""A prompt is computed elsewhere where that takes this engine no more than a part of the time in which it would."""

FIRST_THRESHOLD = 256
"""Tokens, until both speeds have been observed."""

PROBE_EVERY = 32
"""Of prompts that are long but below an observed threshold, one in so many goes to a peer: else what was slow once
would be slow for ever."""

NEVER = 2**31

_WEIGHT = 0.2


def key_of(tenant: str, tokens: Sequence[int], page_size: int) -> bytes:
    """Of a prompt: its tenant and first page, so that prompts which may share a prefix meet at one peer."""
    return repr((tenant, tuple(tokens[:page_size]))).encode()


def choose(key: bytes, loads: Mapping[str, int]) -> str | None:
    """The peer for ``key``: rendezvous hashing, passing over those that have more than their share already.

    ``loads`` says how much each has under way. Whoever chooses among the same peers chooses alike without a word, and
    when one comes or goes only its own keys move. None where there is no peer.
    """
    if not loads:
        return None
    most = ceil(LOAD_BOUND * (sum(loads.values()) + 1) / len(loads))
    ranked = sorted(loads, key=lambda peer: blake2b(key, key=blake2b(peer.encode()).digest()).digest())
    return next(peer for peer in ranked if loads[peer] < most)


class Threshold:
    """From how many uncached prompt tokens on a remote prefill is worth it.

    It costs this engine a round trip and the time in which the pages are moved; without it, the steps that compute the
    prompt, in which everybody else waits. Both are observed.

    Args:
        tokens: the threshold, where somebody knows better.
        page_bytes: bytes of a page of ``page_size`` tokens.
    """

    def __init__(self, tokens: int | None, page_bytes: int, page_size: int) -> None:
        self._tokens = tokens
        self._token_bytes = page_bytes / page_size
        self._step_s: float | None = None
        self._byte_s: float | None = None
        self._overhead_s = 0.0
        self._passed = 0

    def worth(self, tokens: int) -> bool:
        """Whether a prompt with so many uncached tokens is to go to a peer; now and then only to see."""
        if tokens >= self.tokens:
            return True
        if self._tokens is not None or tokens < FIRST_THRESHOLD:
            return False
        self._passed += 1
        return self._passed % PROBE_EVERY == 0

    @property
    def tokens(self) -> int:
        if self._tokens is not None:
            return self._tokens
        if self._step_s is None or self._byte_s is None:
            return FIRST_THRESHOLD
        gain = self._step_s - WORTH * self._byte_s * self._token_bytes
        return NEVER if gain <= 0 else max(1, min(NEVER, ceil(WORTH * self._overhead_s / gain)))

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens, and little else, in ``seconds``."""
        if tokens and seconds > 0:
            self._step_s = _mix(self._step_s, seconds / tokens)

    def moved(self, pages_bytes: int, seconds: float, overhead_s: float) -> None:
        """A transfer moved so many bytes in ``seconds``; all else of it but the prefill itself took ``overhead_s``."""
        if pages_bytes and seconds > 0:
            self._byte_s = _mix(self._byte_s, seconds / pages_bytes)
            self._overhead_s = _mix(self._overhead_s or None, max(0.0, overhead_s))

    def statistics(self) -> dict[str, float]:
        return {
            "remote_threshold_tokens": self.tokens,
            "remote_bytes_per_s": 1 / self._byte_s if self._byte_s else 0.0,
            "remote_overhead_s": self._overhead_s,
        }


def _mix(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
