"""What a simulation found, in figures and in words."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

SHARES = (0.5, 0.9, 0.99)


class Targets(msgspec.Struct, frozen=True):
    """A request is good if its first token came within ``ttft_ms`` and its others, on average, every ``itl_ms``."""

    ttft_ms: float
    itl_ms: float


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Latency":
        ordered = sorted(seconds)
        if not ordered:
            return cls(None, None, None, None, None)
        mean = sum(ordered) / len(ordered)
        return cls(
            *(
                round(1e3 * s, 3)
                for s in (mean, *(ordered[math.ceil(q * len(ordered)) - 1] for q in SHARES), ordered[-1])
            )
        )


@dataclass(slots=True, eq=False)
class Outcome:
    """One request's, as whoever asked sees it. ``gaps`` lie between deliveries of its first answer."""

    at: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    end: str = ""
    resent: int = 0

    def told(self, now: float, tokens: int) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.tokens += tokens

    def is_good(self, targets: Targets) -> bool:
        if self.end not in {"stop", "length"} or self.first is None:
            return False
        pace = (self.last - self.first) / max(1, self.tokens - 1)
        return 1e3 * (self.first - self.at) <= targets.ttft_ms and 1e3 * pace <= targets.itl_ms


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Of one fleet under one workload. ``label`` goes wherever these figures go.

    ``goodput_rps`` counts good requests (see `Targets`) over the time in which requests came, the other rates are over
    ``seconds``, from the first arrival to the last end. ``utilisation`` is the share of that in which replicas
    computed. ``itl_ms`` is of gaps between deliveries, which are tokens where nothing is guessed.
    """

    label: str
    workload: str
    replicas: int
    prefill: int
    requests: int
    ends: dict[str, int]
    seconds: float
    ttft_ms: Latency
    itl_ms: Latency
    requests_per_s: float
    tokens_per_s: float
    good_share: float
    goodput_rps: float
    hit_rate: float
    utilisation: float
    prefill_utilisation: float | None
    preemptions: int
    failures: int
    resent: int
    transfers: dict[str, float]
    steps: int
    wall_s: float

    @property
    def steps_per_s(self) -> float:
        """Of the simulation itself."""
        return self.steps / self.wall_s if self.wall_s else 0.0

    def lines(self) -> Iterator[str]:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        yield f"{self.replicas} replicas" + (f" and {self.prefill} for prefill" if self.prefill else "")
        yield f"  requests     {self.requests} in {self.seconds:.1f} s: {ends}"
        for name, latency in (("TTFT", self.ttft_ms), ("ITL", self.itl_ms)):
            if latency.p50 is not None:
                yield (
                    f"  {name:<4} ms      p50 {latency.p50:.1f}  p90 {latency.p90:.1f}  p99 {latency.p99:.1f}  "
                    f"max {latency.max:.1f}"
                )
        yield f"  throughput   {self.requests_per_s:.2f} requests/s, {self.tokens_per_s:.1f} tokens/s"
        yield f"  goodput      {self.goodput_rps:.2f} requests/s within the targets ({self.good_share:.1%} of them)"
        busy = f"{self.utilisation:.1%}"
        if self.prefill_utilisation is not None:
            busy += f", of those for prefill {self.prefill_utilisation:.1%}"
        yield f"  utilisation  {busy}; prefix hits {self.hit_rate:.1%}, preemptions {self.preemptions}"
        if self.failures:
            yield f"  failures     {self.failures}, requests sent again {self.resent}"
        if self.transfers:
            yield "  transfers    " + ", ".join(f"{name} {value:g}" for name, value in self.transfers.items())
        yield f"  simulated    {self.steps} steps in {self.wall_s:.1f} s ({self.steps_per_s:,.0f} steps/s)"


COLUMNS = ("replicas", "prefill", "TTFT p50", "p99", "ITL p50", "p99", "goodput", "good", "tokens/s", "hits", "busy")


def table(reports: Sequence[Report]) -> Iterator[str]:
    """One line for each, latencies in ms."""
    rows = [
        (
            str(r.replicas),
            str(r.prefill),
            *(
                "-" if value is None else f"{value:.1f}"
                for value in (r.ttft_ms.p50, r.ttft_ms.p99, r.itl_ms.p50, r.itl_ms.p99)
            ),
            f"{r.goodput_rps:.2f}",
            f"{r.good_share:.0%}",
            f"{r.tokens_per_s:.0f}",
            f"{r.hit_rate:.0%}",
            f"{r.utilisation:.0%}",
        )
        for r in reports
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
