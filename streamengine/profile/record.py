"""``profile.json``: what a window of steps did and what it cost. Written once, read by the report and the diff.

Every second of every step is in it once: ``sum(call.total_s for call in calls) + host.seconds == step_s.total``.
Seconds are wall-clock; where a call ran on a GPU they are those between two events around it. None is what is not
known, never what is zero.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamengine.errors import InvalidRequest

VERSION = 1

Scenario = Literal["decode", "prefill", "mixed", "prefix", "guided", "startup", "live"]
"""``live`` is whatever a running engine did."""

Kind = Literal["piece", "attention", "host"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """``cores`` that the process may use, ``threads`` that computed; ``device`` is ``cpu`` or a GPU's name."""

    cpu: str
    cores: int
    threads: int
    device: str = "cpu"


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine can do at best, measured beside the profile: a plain read of memory in GB/s, a large matrix
    product in the model's dtype in GFLOP/s."""

    read_gbps: float
    product_gflops: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the window's steps."""

    total: float
    mean: float
    p50: float
    min: float
    max: float


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """``steps`` that had ``at_most`` so many, and more than the bucket before."""

    at_most: int
    steps: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One place in the flat call list at one bucket of tokens, over all steps of the window.

    ``name`` is the place: ``layers.7: o_proj+mlp | layers.8: norm+qkv``, ``layers.7: attention``, ``host: sampler``.
    ``tokens`` is the bucket: the steps had at most so many, and more than half. ``bytes`` and ``flops`` are those of
    all ``calls`` together: what must be read and written at least, and the floating point operations. ``share`` is of
    ``step_s.total``. ``of_ceiling`` is the per cent that was reached of the nearer ceiling. ``p50_s`` and ``min_s`` are
    of one call: a mean alone cannot tell a slow piece from a busy machine.
    """

    name: str
    kind: Kind
    tokens: int
    calls: int
    total_s: float
    mean_s: float
    share: float
    p50_s: float | None = None
    min_s: float | None = None
    piece: str | None = None
    bytes: int | None = None
    flops: int | None = None
    gbps: float | None = None
    gflops: float | None = None
    of_ceiling: float | None = None


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One that Inductor wrote."""

    name: str
    source: str


class Compile(msgspec.Struct, frozen=True, kw_only=True):
    """What making a piece took, whenever that was. ``trace_s``: its graph → operators; ``lower_s``: → loops and
    buffers; ``codegen_s``: → code; ``cxx_s``: the compiler's run for the library in which its kernels are, together
    with those of ``cxx_pieces`` pieces. ``cache`` says whether this start found it, ``factor`` which one missed."""

    cache: Literal["hit", "miss"]
    factor: str | None = None
    trace_s: float | None = None
    lower_s: float | None = None
    codegen_s: float | None = None
    cxx_s: float | None = None
    cxx_pieces: int | None = None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A unique compiled piece. ``name`` says what is in it, without layers; ``places`` are the names of its calls.
    ``bytes`` and ``flops`` of one call are formulas in T tokens and R logit rows; ``uncounted`` are operators in it
    whose operations are not among them."""

    key: str
    name: str
    places: tuple[str, ...]
    bytes: str | None = None
    flops: str | None = None
    uncounted: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    graph: str | None = None
    code: str | None = None
    compile: Compile | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A call in the timeline; ``start_s`` counts from the step's beginning."""

    name: str
    kind: Kind
    start_s: float
    seconds: float
    piece: str | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the window, whose time was the median: its calls in order. What no event covers is host time."""

    step: int
    rows: int
    tokens: int
    seconds: float
    events: tuple[Event, ...]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Host/other: time of steps that no call covers."""

    seconds: float
    share: float


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds of the same step without and with measuring."""

    off_s: float
    on_s: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The document. ``ledger`` is in bytes, by name; ``startup`` in seconds, by stage; ``rows`` and ``tokens`` say how
    large the steps were; ``trace`` is the path of a Chrome trace that was written beside."""

    version: int = VERSION
    model: str
    architecture: str
    dtype: str
    eager: bool = False
    scenario: Scenario
    created: str
    hardware: Hardware
    ceilings: Ceilings | None = None
    steps: Annotated[int, Meta(ge=1)]
    step_s: StepTime
    rows: tuple[Bucket, ...] = ()
    tokens: tuple[Bucket, ...] = ()
    ledger: dict[str, float] = {}
    startup: dict[str, float] = {}
    calls: tuple[Call, ...] = ()
    host: Host
    pieces: tuple[Piece, ...] = ()
    timeline: Timeline | None = None
    overhead: Overhead | None = None
    trace: str | None = None


def encode(profile: Profile) -> bytes:
    """The document as JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


def read(path: Path) -> Profile:
    """The document at ``path``. Raises `InvalidRequest` where there is none."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read the profile: {error}", param="profile") from error


def decode(document: bytes | str) -> Profile:
    """Raises `InvalidRequest` for what is no profile, or one of another version."""
    try:
        head: Any = msgspec.json.decode(document)
        found = head.get("version") if isinstance(head, dict) else None
        if isinstance(head, dict) and isinstance(refused := head.get("error"), dict):  # what curl saved of an answer
            raise InvalidRequest(f"this is no profile but an error: {refused.get('message')}", param="profile")
        if found != VERSION:
            raise InvalidRequest(f"a profile of version {VERSION} is needed, not {found}", param="version")
        return msgspec.convert(head, Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"this is no profile: {error}", param="profile") from error
