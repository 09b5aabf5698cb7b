"""Discrete events: arrivals, ends of steps, cancellations, replicas that die and come back. Nothing here waits.

Requests go to the replica with the fewest open ones, those that had none for longest first, as a balancer in front of
sockets does (``leastconn``). A replica that dies loses its pages and its cache; its clients send their requests
again with the tokens that they have, after the wait that their SDK would have drawn.
"""

import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

import msgspec

from compiled.step import KVSpec, ModelSpec
from streamengine.config import EngineConfig
from streamengine.planner.replica import Engine
from streamengine.planner.report import Latency, Outcome, Report, Targets
from streamengine.planner.times import StepTimes
from streamengine.planner.workload import Job, Workload
from streamengine.request import Delta, Request

RESEND_FIRST_S, RESEND_LONGEST_S = 0.25, 8.0
"""Waits before a request is sent again: as the SDK draws them by default."""

MAX_RESENT = 16
"""A request that was sent again so often is lost."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A fleet. ``mtbf_s`` is the mean time between failures of one replica (none by default), exponential;
    after one it is back ``repair_s`` later, and empty. ``in_phase``: engines are slow when the
    one was that was measured, and not each at times of its own."""

    config: EngineConfig
    model: ModelSpec
    kv: KVSpec
    times: StepTimes
    targets: Targets
    depth: int = 1
    replicas: int = 1
    seed: int = 0
    mtbf_s: float = math.inf
    repair_s: float = 30.0
    in_phase: bool = False


@dataclass(eq=False)
class Replica:
    """``engine`` is None while it is dead. ``life`` tells events of an earlier life from those of this one."""

    index: int
    engine: Engine | None
    life: int = 0
    turn: int = 0
    open: dict[int, None] = field(default_factory=dict)
    """Requests that it has, in their order."""


@dataclass(eq=False)
class Ask:
    """A request on its way. ``got`` are the tokens that its client has, of a single answer."""

    job: Job
    outcome: Outcome
    got: list[int] = field(default_factory=list)
    replica: Replica | None = None
    answers_left: int = 1


# events, in the order in which those of one time happen


@dataclass(frozen=True, slots=True)
class Landed:
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


Event = Landed | Died | Returned | Asked | Cancelled


class Fleet:
    """One run of ``workload`` through ``plan``. The same seeds give the same figures."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan = plan
        self._workload = workload
        self._jobs = iter(workload.jobs)
        self._random = Random(plan.seed)
        self._events: list[tuple[float, int, Event]] = []
        self._pushed = 0
        self._now = 0.0
        self._turns = 0
        self._asks: dict[int, Ask] = {}
        """Those that have not ended."""
        self.outcomes: list[Outcome] = []
        self._stranded: list[Ask] = []
        """They came while nobody was alive."""
        self._totals: Counter[str] = Counter()
        self._busy_s = 0.0
        self._replicas = [Replica(index, self._engine()) for index in range(plan.replicas)]

    def run(self) -> Report:
        """Until every request has ended; then everything is checked.

        Raises:
            AssertionError: a request or a page was lost: our bug.
        """
        started = time.perf_counter()
        self._next_job()
        if math.isfinite(self._plan.mtbf_s):
            for replica in self._replicas:
                self._push_death(replica)
        while self._asks or self._pending_jobs:
            assert self._events, f"{len(self._asks)} requests are unfinished, and nothing is to happen"
            self._now, _, event = heappop(self._events)
            self._handle(event)
        self._check()
        return self._report(time.perf_counter() - started)

    # events

    def _push(self, at: float, event: Event) -> None:
        self._pushed += 1
        heappush(self._events, (at, self._pushed, event))

    def _push_death(self, replica: Replica) -> None:
        self._push(self._now + self._random.expovariate(1 / self._plan.mtbf_s), Died(replica))

    def _next_job(self) -> None:
        job = next(self._jobs, None)
        self._pending_jobs = job is not None
        if job is not None:
            self._push(job.at, Asked(Ask(job, Outcome(job.at), answers_left=job.request.n)))

    def _handle(self, event: Event) -> None:
        match event:
            case Landed(replica, life):
                if replica.life == life and replica.engine is not None:
                    self._tell(replica.engine.land())
                    self._turn(replica, replica.engine, self._now + self._plan.times.host_s)
            case Asked(ask):
                if not ask.outcome.resent:
                    self._accept(ask)
                self._route(ask)
            case Cancelled(ask):
                self._cancel(ask)
            case Died(replica):
                self._die(replica)
            case Returned(replica):
                replica.engine = self._engine()
                self._push_death(replica)
                stranded, self._stranded = self._stranded, []
                for ask in stranded:
                    self._route(ask)

    def _accept(self, ask: Ask) -> None:
        id = ask.job.request.id
        assert id not in self._asks, f"request {id} came twice"
        self._asks[id] = ask
        self.outcomes.append(ask.outcome)
        if math.isfinite(ask.job.cancel_at):
            self._push(ask.job.cancel_at, Cancelled(ask))
        self._next_job()

    def _route(self, ask: Ask) -> None:
        if ask.outcome.end:
            return  # cancelled before it was sent again
        alive = [replica for replica in self._replicas if replica.engine is not None]
        if not alive:
            self._stranded.append(ask)
            return
        replica = min(alive, key=lambda replica: (len(replica.open), replica.turn))
        self._turns += 1
        replica.turn = self._turns
        ask.replica = replica
        replica.open[ask.job.request.id] = None
        self._post(replica, _remaining(ask))

    def _post(self, replica: Replica, message: Request | int) -> None:
        engine = replica.engine
        assert engine is not None, "a message to the dead"
        engine.post(message)
        if engine.wake_at is None:
            self._turn(replica, engine, self._now)

    def _turn(self, replica: Replica, engine: Engine, now: float) -> None:
        self._tell(engine.turn(now))
        if (at := engine.wake_at) is not None:
            self._push(max(now, at), Landed(replica, replica.life))

    def _tell(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            ask = self._asks[delta.request]
            if delta.index == 0 and delta.tokens:
                ask.outcome.told(self._now, len(delta.tokens))
                ask.got += delta.tokens
            if delta.finish is not None:
                ask.answers_left -= 1
                if not ask.answers_left:
                    finish = delta.finish
                    self._end(ask, finish.cause if finish.reason == "error" else finish.reason)

    def _end(self, ask: Ask, end: str) -> None:
        id = ask.job.request.id
        assert not ask.outcome.end, f"request {id} ended twice"
        ask.outcome.end = end
        self._asks.pop(id)
        if ask.replica is not None:
            del ask.replica.open[id]
            ask.replica = None

    def _cancel(self, ask: Ask) -> None:
        if ask.outcome.end:
            return
        if ask.replica is None:  # between two replicas, or stranded
            self._end(ask, "cancelled")
        else:
            self._post(ask.replica, ask.job.request.id)

    # failures

    def _die(self, replica: Replica) -> None:
        assert replica.engine is not None, "it died twice"
        self._totals["failures"] += 1
        self._retire(replica.engine)
        replica.engine = None
        replica.life += 1
        self._push(self._now + self._plan.repair_s, Returned(replica))
        orphans = [self._asks[id] for id in replica.open]
        replica.open.clear()
        for ask in orphans:
            ask.replica = None
            if ask.outcome.resent == MAX_RESENT or ask.job.request.n > 1 or ask.job.request.beam_width:
                self._end(ask, "lost")
                continue
            wait = min(RESEND_LONGEST_S, RESEND_FIRST_S * 2**ask.outcome.resent) * self._random.random()
            ask.outcome.resent += 1
            self._push(self._now + wait, Asked(ask))

    def _engine(self) -> Engine:
        plan, ratios = self._plan, self._plan.times.ratios
        phase = 0.0 if plan.in_phase or not ratios else self._random.uniform(0, ratios[-1][0])
        return Engine(plan.config, plan.model, plan.kv, plan.depth, plan.times, self._workload.answers, phase)

    def _retire(self, engine: Engine) -> None:
        figures = engine.scheduler.statistics()
        for name in ("preemptions", "prefix_hits", "prefix_queries"):
            self._totals[name] += int(figures.get(name, 0))
        self._totals["steps"] += engine.steps
        self._busy_s += engine.busy_s

    # the end

    def _check(self) -> None:
        assert not self._asks and all(outcome.end for outcome in self.outcomes), "a request is lost"
        for replica in self._replicas:
            assert not replica.open, f"replica {replica.index} has requests that have ended"
            if replica.engine is not None:
                replica.engine.check_idle()

    def _report(self, wall_s: float) -> Report:
        plan, outcomes, totals = self._plan, self.outcomes, self._totals
        for replica in self._replicas:
            if replica.engine is not None:
                self._retire(replica.engine)
        begin = outcomes[0].at if outcomes else 0.0
        seconds = self._now - begin
        arrivals_s = outcomes[-1].at - begin if outcomes else 0.0
        good = sum(outcome.is_good(plan.targets) for outcome in outcomes)
        gaps = array("d")
        for outcome in outcomes:
            gaps.extend(outcome.gaps)
        return Report(
            label=f"simulated, step times from {plan.times.source}",
            workload=self._workload.about,
            replicas=plan.replicas,
            prefill=0,
            requests=len(outcomes),
            ends=dict(Counter(outcome.end for outcome in outcomes)),
            seconds=seconds,
            ttft_ms=Latency.of(outcome.first - outcome.at for outcome in outcomes if outcome.first is not None),
            itl_ms=Latency.of(gaps),
            requests_per_s=_rate(len(outcomes), seconds),
            tokens_per_s=_rate(sum(outcome.tokens for outcome in outcomes), seconds),
            good_share=_rate(good, len(outcomes)),
            goodput_rps=_rate(good, arrivals_s or seconds),
            hit_rate=_rate(totals["prefix_hits"], totals["prefix_queries"]),
            utilisation=_rate(self._busy_s, seconds * plan.replicas),
            prefill_utilisation=None,
            preemptions=totals["preemptions"],
            failures=totals["failures"],
            resent=sum(outcome.resent for outcome in outcomes),
            transfers={},
            steps=totals["steps"],
            wall_s=wall_s,
        )


def _rate(count: float, over: float) -> float:
    return count / over if over else 0.0


def _remaining(ask: Ask) -> Request:
    """What its client asks for now: the rest of an answer that has begun."""
    return msgspec.structs.replace(ask.job.request, answered=tuple(ask.got))
