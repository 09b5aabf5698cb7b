"""When the tokens of one answer came. No clock: times are arguments, in seconds on one monotonic clock."""

from collections import Counter
from math import exp, floor, log

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds on the engine's monotonic clock; ``None`` where it did not come to that."""

    total_ms: float
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    decode_ms: float | None = None
    tokens_per_s: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_max_ms: float | None = None
    forced_tokens: int = 0
    """Not a time: answer tokens that a grammar left no choice about, so that no step was spent on choosing them."""
    continued_tokens: int = 0
    """Nor this: answer tokens that came with the request, from an engine that began it. The times are without them."""
    remote_prefill: str | None = None
    """``done`` where another engine computed the prompt, else why one that was to compute it did not; None where none
    was asked."""


class Stopwatch:
    """When the tokens of one answer came. All times in seconds on one monotonic clock.

    The gaps between tokens are counted in geometric buckets, so percentiles are exact to 2.5 % and memory
    does not grow with the answer; the longest is exact. Tokens of one step come at one time: no gap.
    """

    def __init__(self, submitted: float, continued: int = 0) -> None:
        self.remote_prefill: str | None = None
        self._submitted = submitted
        self._continued = continued
        self._queued: float | None = None
        self._first: float | None = None
        self._last = submitted
        self._count = self._forced = 0
        self._longest = 0.0
        self._buckets: Counter[int] = Counter()

    def start(self, queued: float) -> None:
        """The first step ran ``queued`` seconds after the core took the request."""
        self._queued = queued

    def tokens(self, count: int, now: float, forced: int = 0) -> None:
        """``count`` answer tokens came at ``now``, ``forced`` of them without a choice."""
        self._forced += forced
        if count == 0:
            return
        if self._first is None:
            self._first = now
        else:
            self._gap(now - self._last, 1)
        self._gap(0.0, count - 1)
        self._last = now
        self._count += count

    def timing(self, now: float) -> Timing:
        """All of it, for an answer that ends at ``now``."""
        total_ms = (now - self._submitted) * 1000
        queue_ms = None if self._queued is None else self._queued * 1000
        if self._first is None:
            return Timing(
                total_ms=total_ms,
                queue_ms=queue_ms,
                continued_tokens=self._continued,
                remote_prefill=self.remote_prefill,
            )
        ttft_ms, decode_ms = (self._first - self._submitted) * 1000, (self._last - self._first) * 1000
        gaps = self._count - 1
        return Timing(
            total_ms=total_ms,
            queue_ms=queue_ms,
            prefill_ms=None if queue_ms is None else max(0.0, ttft_ms - queue_ms),
            ttft_ms=ttft_ms,
            decode_ms=decode_ms,
            tokens_per_s=gaps * 1000 / decode_ms if gaps and decode_ms > 0 else None,
            itl_p50_ms=self._percentile(0.50) * 1000 if gaps else None,
            itl_p99_ms=self._percentile(0.99) * 1000 if gaps else None,
            itl_max_ms=self._longest * 1000 if gaps else None,
            forced_tokens=self._forced,
            continued_tokens=self._continued,
            remote_prefill=self.remote_prefill,
        )

    def gaps(self) -> list[tuple[float, int]]:
        """``(seconds between two tokens, how often)``."""
        return [(_middle(bucket), count) for bucket, count in self._buckets.items()]

    def _gap(self, seconds: float, count: int) -> None:
        if count:
            self._longest = max(self._longest, seconds)
            self._buckets[_bucket(seconds)] += count

    def _percentile(self, share: float) -> float:
        """The smallest bucket's middle such that ``share`` of the gaps lie in it or below."""
        rest = share * self._buckets.total()
        for bucket in sorted(self._buckets):
            rest -= self._buckets[bucket]
            if rest <= 0:
                return min(_middle(bucket), self._longest)
        return self._longest


_RATIO = log(1.05)
_LEAST_S, _MOST_S = 1e-6, 1e5
_ZERO = floor(log(_LEAST_S) / _RATIO)


def _bucket(seconds: float) -> int:
    return _ZERO if seconds <= _LEAST_S else floor(log(min(seconds, _MOST_S)) / _RATIO)


def _middle(bucket: int) -> float:
    return 0.0 if bucket == _ZERO else exp((bucket + 0.5) * _RATIO)
