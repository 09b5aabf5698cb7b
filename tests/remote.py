"""Two or more schedulers that speak through a network which loses, delays and repeats, driven by hand."""

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from streamengine.errors import StreamEngineError
from streamengine.guided.grammar import Constraint
from streamengine.request import Delta, Finish, Request
from streamengine.transfer.choose import Threshold
from streamengine.transfer.connector import Connector
from streamengine.transfer.decode import Decode
from streamengine.transfer.prefill import Prefills
from streamengine.transfer.values import (
    Card,
    Connected,
    Failed,
    Fingerprint,
    Forget,
    Landed,
    Lost,
    Message,
    Order,
    Read,
    Received,
    Report,
    Send,
)
from tests.fakes import FakeRunner
from tests.scheduling import Bench

FINGERPRINT = Fingerprint(
    model="m",
    compute="float32",
    dtype="float32",
    page_size=4,
    page_bytes=64,
    layers=1,
    layout="",
    transport="t",
    transport_version="1",
)
SCRIBBLE = b"\xee"
LEASE_S, DEADLINE_S = 6.0, 20.0


@dataclass(eq=False)
class FakeWorker:
    """Everything that it was told waits for the test to let it happen."""

    outbox: dict[str, deque[Message]] = field(default_factory=dict)
    """Of each peer that is connected."""
    reads: dict[str, tuple[Read, FakeRunner]] = field(default_factory=dict)
    sources: dict[str, tuple[str, FakeRunner]] = field(default_factory=dict)
    """Incarnation and memory of each peer that is connected."""
    reports: list[Report] = field(default_factory=list)
    closed: bool = False

    def post(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Send(peer, message):
                    if peer in self.outbox:
                        self.outbox[peer].append(message)
                case Read():
                    assert order.transfer not in self.reads, "read twice"
                    incarnation, runner = self.sources.get(order.peer, ("", None))
                    if incarnation == order.incarnation and runner is not None:
                        self.reads[order.transfer] = order, runner
                    else:
                        self.reports.append(Failed(order.transfer, "not connected"))
                case Forget():
                    raise AssertionError("nobody says that")

    def poll(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.closed = True


class Engine(Bench):
    """A `Bench` whose requests may be computed elsewhere, or that computes those of others; ``now`` is its clock."""

    def __init__(
        self,
        name: str,
        incarnation: int = 1,
        *,
        decode: bool = False,
        prefill: bool = False,
        now: float = 0.0,
        reserve: int = 16,
        threshold: int = 1,
        on_failure: str = "recompute",
        most: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(transfer_reserve=reserve, **options)
        self.card = Card(engine=name, incarnation=f"{name}-{incarnation}", fingerprint=FINGERPRINT)
        self.now = now
        self.worker = FakeWorker()
        size = self.pool.page_size
        self.threshold = Threshold(threshold, self.runner.kv.page_bytes, size)
        self.decode = self.prefills = None
        landing = self.scheduler.landing
        if decode:
            self.decode = Decode(
                landing,
                self.threshold,
                room=reserve // (1 + prefill),
                name=self.card.incarnation,
                page_size=size,
                page_bytes=self.runner.kv.page_bytes,
                lease_s=LEASE_S,
                deadline_s=DEADLINE_S,
                on_failure=on_failure,  # type: ignore[arg-type]
            )
        if prefill:
            self.prefills = Prefills(
                landing,
                engine=name,
                incarnation=self.card.incarnation,
                page_size=size,
                room=reserve // (1 + decode),
                most=most,
                vocab_size=self.runner.model.vocab_size,
                checksums=None,
            )
        self.connector = Connector(self.worker, landing, self.decode, self.prefills)

    def enter(self, request: Request, constraint: Constraint | None) -> list[Delta]:
        sequence = self.scheduler.check_room(request, self.now, len(self.connector), constraint)
        return self.connector.submit(sequence, self.now)

    def abort(self, id: int) -> list[Delta]:
        ends = self.connector.cancel(id, "client") + self.scheduler.abort(id, "client")
        return self.note(ends)

    def note(self, deltas: Any) -> list[Delta]:
        return super().note(self.connector.told(list(deltas), self.now))

    def exchange(self) -> None:
        """What the core does between two steps."""
        turn = self.connector.turn(self.now, [step.number for step, _ in self.in_flight])
        self.note(turn.deltas)
        for request in turn.submit:
            try:
                sequence = self.scheduler.check_room(request, self.now, len(self.connector))
                self.note(self.connector.submit(sequence, self.now))
            except StreamEngineError as error:
                self.note([Delta(request=request.id, finish=Finish("error", error.code, error.message))])
        for id in turn.abort:
            self.abort(id)

    def turn(self) -> list[Delta]:
        self.exchange()
        deltas = super().turn()
        self.check()
        return deltas

    def run(self, turns: int = 2000) -> None:
        """Until the scheduler has nothing to do."""
        self.exchange()
        while self.scheduler.has_work or self.in_flight:
            self.turn()
            turns -= 1
            assert turns > 0, f"no end in sight: {self.scheduler.statistics()}"

    def alone_below(self, tokens: int) -> None:
        """Only prompts of so many tokens are computed elsewhere from now on."""
        self.threshold._tokens = tokens

    def check(self) -> None:
        self.scheduler.check()
        self.connector.check()

    # what the test lets the worker do

    def receive(self, peer: str, message: Message) -> None:
        self.worker.reports.append(Received(peer, message))

    def connected(self, peer: str, other: "Engine", *, dialed: bool) -> None:
        self.worker.outbox[peer] = deque()
        self.worker.sources[peer] = other.card.incarnation, other.runner
        self.worker.reports.append(Connected(peer, other.card, dialed))

    def lost(self, peer: str) -> None:
        del self.worker.outbox[peer], self.worker.sources[peer]
        self.worker.reports.append(Lost(peer, "cut"))

    def scribble(self, transfer: str) -> None:
        """A read that is on its way writes something into all of its pages."""
        read, _ = self.worker.reads[transfer]
        self.runner.settle()
        for _, here in read.pairs:
            self.runner._page(here)[:] = SCRIBBLE * self.runner.kv.page_bytes

    def end_read(self, transfer: str, *, well: bool = True) -> None:
        read, source = self.worker.reads.pop(transfer)
        self.runner.settle()
        if not well:
            self.worker.reports.append(Failed(transfer, "broken"))
            return
        for there, here in read.pairs:
            self.runner._page(here)[:] = source._page(there)
        self.worker.reports.append(Landed(transfer, 0.001))


class Wire:
    """One connection after another between ``decode`` and ``prefill``, which ``decode`` calls ``peer``."""

    def __init__(self, decode: Engine, prefill: Engine, peer: str) -> None:
        self.decode, self.prefill, self.peer = decode, prefill, peer
        self.accepted = ""
        self.past: list[tuple[Engine, str, Message]] = []
        """What was delivered once."""
        self._connections = count(1)

    @property
    def up(self) -> bool:
        return bool(self.accepted)

    def connect(self) -> None:
        self.accepted = f"{self.peer}-accepted-{next(self._connections)}"
        self.decode.connected(self.peer, self.prefill, dialed=True)
        self.prefill.connected(self.accepted, self.decode, dialed=False)

    def cut(self) -> None:
        self.decode.lost(self.peer)
        self.prefill.lost(self.accepted)
        self.accepted = ""

    def deliver(self, most: int = 1000) -> None:
        """Up to ``most`` messages in each direction."""
        for sender, name, receiver, called in (
            (self.decode, self.peer, self.prefill, self.accepted),
            (self.prefill, self.accepted, self.decode, self.peer),
        ):
            queue = sender.worker.outbox.get(name, deque())
            for _ in range(min(most, len(queue))):
                message = queue.popleft()
                self.past.append((receiver, called, message))
                receiver.receive(called, message)

    def repeat(self, pick: int) -> None:
        """Something that was said comes once more, whenever that was."""
        if self.past:
            receiver, called, message = self.past[pick % len(self.past)]
            if receiver in (self.decode, self.prefill):
                receiver.receive(called, message)
