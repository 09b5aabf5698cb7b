"""What a simulation is of, what is in it, and what may happen next."""

import math
from dataclasses import dataclass, field

from compiled.step import KVSpec, ModelSpec
from streamengine.config import EngineConfig
from streamengine.planner.replica import Engine
from streamengine.planner.report import Outcome, Targets
from streamengine.planner.times import StepTimes
from streamengine.planner.wires import Delivery, Place
from streamengine.planner.workload import Job


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A fleet of ``replicas`` that answer and, if any, ``prefill`` that compute prompts for them: those of which at
    least ``prefill_threshold`` tokens are to be computed (None: as the engines observe it). Between any two engines
    there are ``bytes_per_s`` and ``latency_s``. ``mtbf_s`` is the mean time between failures of one replica (none by
    default), exponential; after one it is back ``repair_s`` later, and empty. ``in_phase``: engines are slow when the
    one was that was measured, and not each at times of its own.
    """

    config: EngineConfig
    model: ModelSpec
    kv: KVSpec
    times: StepTimes
    targets: Targets
    replicas: int = 1
    prefill: int = 0
    prefill_threshold: int | None = None
    bytes_per_s: float = 10e9
    latency_s: float = 100e-6
    seed: int = 0
    mtbf_s: float = math.inf
    repair_s: float = 30.0
    in_phase: bool = False


@dataclass(eq=False)
class Replica:
    """``engine`` is None while it is dead. The life in ``place`` tells events of an earlier one from those of this."""

    place: Place
    engine: Engine | None = None
    turn: int = 0
    wakes_at: float = math.inf
    """When a `Woken` for this life is due."""
    open: dict[int, None] = field(default_factory=dict)
    """Requests that it has, in their order."""

    def living(self, life: int) -> Engine | None:
        return self.engine if self.place.life == life else None


@dataclass(eq=False)
class Ask:
    """A request on its way. ``got`` are the tokens that its client has, of a single answer."""

    job: Job
    outcome: Outcome
    got: list[int] = field(default_factory=list)
    replica: Replica | None = None
    answers_left: int = 1


@dataclass(frozen=True, slots=True)
class Over:
    """The oldest step of that life's engine."""

    replica: Replica
    life: int


@dataclass(frozen=True, slots=True)
class Woken:
    replica: Replica
    life: int


@dataclass(frozen=True, slots=True)
class Died:
    replica: Replica


@dataclass(frozen=True, slots=True)
class Returned:
    replica: Replica


@dataclass(frozen=True, slots=True)
class Asked:
    ask: Ask


@dataclass(frozen=True, slots=True)
class Cancelled:
    ask: Ask


Event = Over | Woken | Died | Returned | Asked | Cancelled | Delivery
