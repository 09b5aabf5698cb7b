"""How many replicas: what was asked for, and what they say of themselves. Pure: no clock, no Ray."""

from collections.abc import Sequence
from math import ceil

import msgspec

from streamengine.errors import StartupError

OPEN_ENGINE = "streamengine.compose:open_engine"

FULL = 0.9
"""Share of the KV pages above which a replica will soon preempt."""

IDLE = 0.3
"""Share of the seats below which a fleet could do with a replica less."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to run.

    Args:
        replicas: at least so many.
        max_replicas: and at most, when requests wait or KV caches are full; None is ``replicas``.
        cpus: that Ray reserves for each replica.
        gpus: likewise.
        prefill: replicas that compute prompts for the others, all on one machine.
        prefill_threshold: see `TransferConfig`.
        engine: opens a replica's engine from its config: ``module:function``.
    """

    replicas: int = 1
    max_replicas: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    prefill: int = 0
    prefill_threshold: int | None = None
    engine: str = OPEN_ENGINE

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise StartupError(f"replicas must be at least 1, not {self.replicas}", param="replicas")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            text = f"max_replicas {self.max_replicas} is below replicas {self.replicas}"
            raise StartupError(text, param="max_replicas")
        if self.prefill < 0:
            raise StartupError(f"prefill must be at least 0, not {self.prefill}", param="prefill")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica: requests that run and that wait, how many may run, and the share of KV pages in use (0 to 1)."""

    running: float
    waiting: float
    seats: float
    kv_used: float


def wanted_replicas(loads: Sequence[Load], least: int, most: int) -> int:
    """``least`` to ``most``, for the replicas whose ``loads`` these are.

    Open connections say nothing: an idle chat holds one. More are wanted for requests that wait, as many as would
    seat them, and where the KV caches are full on average. One less is wanted, not several at once, where `IDLE` of
    the seats are in use at most and the rest would stay below `FULL` in pages.
    """
    here = len(loads)
    if not here:
        return least
    waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
    seats, kv_used = sum(load.seats for load in loads), sum(load.kv_used for load in loads) / here
    wanted = here
    if waiting:
        wanted = here + max(1, ceil(waiting / max(seats / here, 1)))
    elif kv_used > FULL:
        wanted = here + 1
    elif here > 1 and running <= IDLE * seats and kv_used * here / (here - 1) < FULL:
        wanted = here - 1
    return min(max(wanted, least), most)
