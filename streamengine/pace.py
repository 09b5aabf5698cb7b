"""How much of a prompt may go along with decoding rows, so that those keep their inter-token latency.

A step takes a base time for its decoding rows plus a time per prompt token: a line, fitted to the steps that ran,
newer ones counting more. The next chunk is where the line meets the target. It is followed from the mean of
what was measured, so wherever the line is wrong the chunk still comes to rest only where steps take the target.
Pure: no clock.
"""

from compiled.step import Step

MEMORY = 0.8
"""What a measurement is worth after the next one."""

GROWTH = 2
"""A chunk is at most this many times the last: what a small one costs says little about a large one."""

FLATTEST = 0.2
"""The line's slope is taken for at least this share of the mean time per prompt token: chunks of one size and
noise, or a machine that has just become slower, give any slope."""


class Pace:
    """One engine's. Without a target the chunk is the whole budget.

    Args:
        target_s: the inter-token latency to keep, in seconds.
        budget: tokens of a step.
        least: prompt tokens that go in with every step, whatever they cost: no prompt is starved.
    """

    def __init__(self, target_s: float | None, budget: int, least: int = 16) -> None:
        self._target_s = target_s
        self._budget = budget
        self._least = min(least, budget)
        self._chunk = budget if target_s is None else self._least
        # Of the steps so far, discounted: their number, and sums over prompt tokens p and seconds s.
        self._n = self._p = self._s = self._pp = self._ps = 0.0

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens of the next step, if any row decodes in it; 1 to ``budget``."""
        return self._chunk

    def observe(self, step: Step, seconds: float) -> None:
        """``step`` took ``seconds``."""
        decode = sum(row.sampling is not None and len(row.tokens) == 1 + row.drafts for row in step.rows)
        tokens = sum(len(row.tokens) for row in step.rows if row.sampling is None or len(row.tokens) > 1 + row.drafts)
        self.measured(seconds, decode, tokens)

    def measured(self, seconds: float, decode_rows: int, prefill_tokens: int) -> None:
        """A step with that many decoding rows and prompt tokens took ``seconds``."""
        if self._target_s is None or decode_rows == 0:
            return  # nobody's latency
        p, s = prefill_tokens, seconds
        self._n = MEMORY * self._n + 1
        self._p = MEMORY * self._p + p
        self._s = MEMORY * self._s + s
        self._pp = MEMORY * self._pp + p * p
        self._ps = MEMORY * self._ps + p * s
        if p:
            self._chunk = max(self._least, min(self._fitting(self._target_s), GROWTH * self._chunk))

    def _fitting(self, target_s: float) -> int:
        """Prompt tokens with which a step takes ``target_s``, by the line."""
        mean_p, mean_s = self._p / self._n, self._s / self._n
        room, slope = target_s - mean_s, self._slope(mean_s / mean_p)
        if room >= slope * (self._budget - mean_p):
            return self._budget
        return int(mean_p + room / slope)

    def _slope(self, steepest: float) -> float:
        """Seconds per prompt token; ``steepest`` is what it would be without any base time."""
        variance = self._n * self._pp - self._p**2
        if variance <= 1e-6 * self._pp * self._n:
            return steepest
        slope = (self._n * self._ps - self._p * self._s) / variance
        return max(FLATTEST * steepest, min(slope, steepest))

    def statistics(self) -> dict[str, float]:
        """The chunk of the next step, in prompt tokens."""
        return {"prefill_budget": self._chunk}
