"""What a window of measured steps saw: the contract between whoever measures and whoever reads.

Frozen values, standard library only, like `compiled.step`. Seconds are wall-clock and count from the beginning of
their step; on a GPU they are those between events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from compiled.work import Work

Kind = Literal["piece", "attention", "host"]

MAX_STEPS = 1000
"""Of one window: each call of each step is kept until its end."""


class Span(NamedTuple):
    """One call of ``places[place]``, and what it had to do, where that is known."""

    place: int
    start: float
    seconds: float
    bytes: int | None = None
    flops: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a step: a call of the compiled piece ``piece``, an attention call, or a part of the host's work."""

    name: str
    kind: Kind
    piece: str | None = None


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """``rows`` and ``tokens`` of step ``number``; ``bucket`` is the power of two that its tokens, as padded, fit in."""

    number: int
    rows: int
    tokens: int
    bucket: int
    seconds: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PieceAbout:
    """A unique compiled piece: what is in it and how it was made. ``seconds`` by stage, where somebody noted them;
    ``found`` says whether this start had it from the cache, ``missed`` why not."""

    key: str
    places: tuple[str, ...]
    work: Work | None = None
    graph: str | None = None
    code: str | None = None
    kernels: Mapping[str, str] | None = None
    seconds: Mapping[str, float] | None = None
    found: bool = False
    missed: str | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """``plain`` are the seconds of the steps that ran unmeasured before ``steps``; ``device`` is what computed."""

    places: tuple[Place, ...]
    pieces: tuple[PieceAbout, ...]
    plain: tuple[float, ...]
    steps: tuple[MeasuredStep, ...]
    device: str
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """What is to be measured: ``steps`` of them, after ``plain`` ones that are only timed. With ``trace``, a path,
    torch's own profiler runs beside and writes a Chrome trace there: dearer, and it knows operators."""

    steps: int
    plain: int = 0
    trace: str | None = None


class Profiled(Protocol):
    """A runner whose steps can be measured, one window at a time."""

    def profile(self, measure: Measure) -> None:
        """Measure the next steps, in place of what was being measured."""
        ...

    def profiled(self, *, stop: bool = False) -> Window | None:
        """The window, once, as soon as it is complete or, with ``stop``, as far as it is; else None."""
        ...

    def ceilings(self) -> Mapping[str, float]:
        """What the device can do at best, measured now, which takes about a second: ``read_gb_s`` from its memory and
        ``multiply_gflop_s`` in the model's dtype."""
        ...

    def plain_read(self, size: int) -> Callable[[], float]:
        """What reads ``size`` bytes of the device's memory, as fast as it can, and returns the seconds."""
        ...
