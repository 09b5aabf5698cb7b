"""Discrete events: arrivals, ends of steps, cancellations, replicas that die and come back. Nothing here waits.

Requests go to the replica with the fewest open ones, those that had none for longest first, as a balancer in front of
sockets does (``leastconn``). A replica that dies loses its pages and its cache; its clients send their requests
again with the tokens that they have, after the wait that their SDK would have drawn.

Where some replicas compute prompts alone, each of the others is connected to all of them, and its own connector
decides which prompts go where, with all that comes of it: leases, deadlines, fallbacks.
"""

import dataclasses
import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from random import Random

import msgspec

from streamengine.config import EngineConfig, TransferConfig
from streamengine.planner.replica import Engine
from streamengine.planner.report import Latency, Outcome, Report
from streamengine.planner.state import Ask, Asked, Cancelled, Died, Event, Over, Plan, Replica, Returned, Woken
from streamengine.planner.wires import Delivery, Network, Place
from streamengine.planner.workload import Distinct, Workload
from streamengine.request import Delta, Request
from streamengine.transfer.values import Connected, Failed, Landed, Lost

RESEND_FIRST_S, RESEND_LONGEST_S = 0.25, 8.0
"""Waits before a request is sent again: as the SDK draws them by default."""

TRANSFERS = ("remote_sent", "remote_landed", "remote_fallbacks", "remote_bytes")

MAX_RESENT = 16
"""A request that was sent again so often is lost."""


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
        self._busy = {False: 0.0, True: 0.0}
        self._last_end = 0.0
        self._network = Network(plan.bytes_per_s, plan.latency_s, plan.kv.page_bytes)
        self._prefills = [Replica(Place(True, index, 0)) for index in range(plan.prefill)]
        self._decodes = [Replica(Place(False, index, 0)) for index in range(plan.replicas)]
        self._configs = {prefill: self._config(prefill) for prefill in (False, True)}
        for replica in (*self._prefills, *self._decodes):
            self._start(replica)

    def run(self) -> Report:
        """Until every request has ended; then everything is checked.

        Raises:
            AssertionError: a request or a page was lost: our bug.
        """
        started = time.perf_counter()
        self._next_job()
        if math.isfinite(self._plan.mtbf_s):
            for replica in (*self._prefills, *self._decodes):
                self._push_death(replica)
        while self._events:
            self._now, _, event = heappop(self._events)
            # In the end what is still held is given back, and nobody dies any more.
            if self._asks or self._pending_jobs or isinstance(event, Over | Woken | Delivery):
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
            case Over(replica, life):
                if (engine := replica.living(life)) is not None:
                    self._tell(engine.land(self._now))
                    self._carry(replica, engine, self._now)
                    self._turn(replica, engine, self._now + self._plan.times.host_s)
            case Woken(replica, life):
                if (engine := replica.living(life)) is not None:
                    replica.wakes_at = math.inf
                    self._nudge(replica, engine)
            case Delivery():
                self._deliver(event)
            case Asked(ask):
                if not ask.outcome.resent:
                    self._accept(ask)
                self._route(ask)
            case Cancelled(ask):
                self._cancel(ask)
            case Died(replica):
                self._die(replica)
            case Returned(replica):
                self._return(replica)

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
        alive = [replica for replica in self._decodes if replica.engine is not None]
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
        self._nudge(replica, engine)

    def _nudge(self, replica: Replica, engine: Engine) -> None:
        """There is something to look at, for an engine that waits for no step."""
        if engine.lands_at is None:
            self._turn(replica, engine, self._now)

    def _turn(self, replica: Replica, engine: Engine, now: float) -> None:
        self._tell(engine.turn(now))
        self._carry(replica, engine, now)
        if self._plan.config.debug:
            engine.check()
        if (at := engine.lands_at) is not None:
            self._push(max(now, at), Over(replica, replica.place.life))
        elif (at := engine.wakes_at(now)) is not None and at < replica.wakes_at:
            replica.wakes_at = at
            self._push(at, Woken(replica, replica.place.life))

    def _carry(self, replica: Replica, engine: Engine, now: float) -> None:
        for delivery in self._network.carry(replica.place, engine.wire.drain(), now):
            self._push(delivery.at, delivery)

    def _deliver(self, delivery: Delivery) -> None:
        to, report, source = delivery.to, delivery.report, delivery.source
        replica = (self._prefills if to.prefill else self._decodes)[to.number]
        if (engine := replica.living(to.life)) is None:
            return
        if isinstance(report, Landed) and source is not None and self._network.names.get(source.peer) != source:
            report = Failed(report.transfer, f"{source.peer} died")
        engine.wire.reports.append(report)
        self._nudge(replica, engine)

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
        ask.outcome.end, self._last_end = end, self._now
        del self._asks[id]
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

    # lives

    def _start(self, replica: Replica) -> None:
        plan, place, speeds = self._plan, replica.place, self._plan.times.speeds
        phase = 0.0 if plan.in_phase or not speeds else self._random.uniform(0, speeds[-1][0])
        answers = Distinct() if place.prefill else self._workload.answers
        config = self._configs[place.prefill]
        replica.engine = Engine(config, plan.model, plan.kv, place, plan.times, answers, phase)
        self._network.names[place.peer] = place
        for other in self._decodes if place.prefill else self._prefills:
            if other.engine is None:
                continue
            prefill, decode = (place, other.place) if place.prefill else (other.place, place)
            at = self._now + (plan.latency_s if place.prefill else 0.0)
            self._push(at, Delivery(at, decode, Connected(prefill.peer, prefill.card(plan.kv))))
            self._push(at, Delivery(at, prefill, Connected(decode.peer, decode.card(plan.kv), dialed=False)))

    def _config(self, prefill: bool) -> EngineConfig:
        plan = self._plan
        if not plan.prefill:
            return plan.config
        here = "unix:planned"
        transfer = (
            TransferConfig(role="prefill", listen=here)
            if prefill
            else TransferConfig(role="decode", peers=(here,), prefill_threshold=plan.prefill_threshold)
        )
        return msgspec.structs.replace(plan.config, transfer=transfer)

    def _return(self, replica: Replica) -> None:
        self._start(replica)
        self._push_death(replica)
        stranded, self._stranded = self._stranded, []
        for ask in stranded:
            self._route(ask)

    def _die(self, replica: Replica) -> None:
        assert replica.engine is not None, "it died twice"
        self._totals["failures"] += 1
        self._retire(replica)
        place, replica.engine, replica.wakes_at = replica.place, None, math.inf
        del self._network.names[place.peer]
        replica.place = dataclasses.replace(place, life=place.life + 1)
        self._push(self._now + self._plan.repair_s, Returned(replica))
        for other in self._decodes if place.prefill else self._prefills:
            at = self._now + self._plan.latency_s
            self._push(at, Delivery(at, other.place, Lost(place.peer, "it died")))
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

    def _retire(self, replica: Replica) -> None:
        """Count what its engine has done."""
        if replica.engine is None:
            return
        figures = replica.engine.statistics()
        for name in ("preemptions", "prefix_hits", "prefix_queries", *TRANSFERS):
            self._totals[name] += int(figures.get(name, 0))
        self._totals["remote_fallbacks"] += sum(int(figures[name]) for name in figures if "_fallbacks_" in name)
        self._totals["steps"] += replica.engine.steps
        self._busy[replica.place.prefill] += replica.engine.busy_s

    # the end

    def _check(self) -> None:
        assert not self._asks and all(outcome.end for outcome in self.outcomes), "a request is lost"
        for replica in (*self._prefills, *self._decodes):
            assert not replica.open, f"{replica.place.peer} has requests that have ended"
            if replica.engine is not None:
                replica.engine.check_idle()

    def _report(self, wall_s: float) -> Report:
        plan, outcomes, totals = self._plan, self.outcomes, self._totals
        for replica in (*self._prefills, *self._decodes):
            self._retire(replica)
        begin = outcomes[0].at if outcomes else 0.0
        seconds = self._last_end - begin
        arrivals_s = outcomes[-1].at - begin if outcomes else 0.0
        good = sum(outcome.is_good(plan.targets) for outcome in outcomes)
        gaps = array("d")
        for outcome in outcomes:
            gaps.extend(outcome.gaps)
        return Report(
            label=f"simulated, step times from {plan.times.source}",
            workload=self._workload.about,
            replicas=plan.replicas,
            prefill=plan.prefill,
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
            utilisation=_rate(self._busy[False], seconds * plan.replicas),
            prefill_utilisation=_rate(self._busy[True], seconds * plan.prefill) if plan.prefill else None,
            preemptions=totals["preemptions"],
            failures=totals["failures"],
            resent=sum(outcome.resent for outcome in outcomes),
            transfers={name.removeprefix("remote_"): totals[name] for name in TRANSFERS} if plan.prefill else {},
            steps=totals["steps"],
            wall_s=wall_s,
        )


def _rate(count: float, over: float) -> float:
    return count / over if over else 0.0


def _remaining(ask: Ask) -> Request:
    """What its client asks for now: the rest of an answer that has begun."""
    return msgspec.structs.replace(ask.job.request, answered=tuple(ask.got))
