"""Between the core and the worker: one turn of the core moves reports in, and orders, requests and deltas out."""

from typing import NamedTuple, Protocol

from compiled.step import Step
from streamengine.landing import Landing
from streamengine.request import Delta, Request, Sequence
from streamengine.transfer.decode import Decode
from streamengine.transfer.prefill import Prefills
from streamengine.transfer.values import Order, Report

LEARN_TOKENS, LEARN_SHARE = 32, 0.9


class Worker(Protocol):
    """Carries out orders in a thread of its own."""

    def post(self, orders: list[Order]) -> None: ...

    def poll(self) -> list[Report]:
        """What has happened since the last call. Never blocks."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read from while reports wait."""
        ...

    def close(self) -> None:
        """Nothing writes into our memory after this."""
        ...


class Turn(NamedTuple):
    """What the core is to do: ``submit`` prompts of other engines, ``abort`` some of those, tell clients ``deltas``."""

    submit: list[Request]
    abort: list[int]
    deltas: list[Delta]


class Connector:
    """One engine's part in remote prefills: ``decode`` for its own requests, ``prefills`` for those of others."""

    def __init__(self, worker: Worker, landing: Landing, decode: Decode | None, prefills: Prefills | None) -> None:
        self._worker = worker
        self._landing = landing
        self._decode = decode
        self._prefills = prefills
        self._halves: list[Decode | Prefills] = [half for half in (decode, prefills) if half is not None]

    def __len__(self) -> int:
        """Requests of clients that are not in the scheduler yet."""
        return 0 if self._decode is None else len(self._decode)

    @property
    def unfinished(self) -> list[int]:
        """Ids of those."""
        return [] if self._decode is None else self._decode.unfinished

    def fileno(self) -> int:
        return self._worker.fileno()

    def submit(self, sequence: Sequence, now: float) -> list[Delta]:
        """Take in a new request that `Scheduler.check_room` let pass: its prompt is computed elsewhere, or it waits for
        its turn here. Gives what `Books.queue` does."""
        if self._decode is None or sequence.request.id < 0:
            return self._landing.enter(sequence)
        taken = self._decode.offer(sequence, now)
        deltas = self._post()
        return deltas if taken else deltas + self._landing.enter(sequence)

    def cancel(self, request: int, cause: str, index: int | None = None) -> list[Delta]:
        """See `Scheduler.abort`, which is to follow: one of the two has the request, if any."""
        if self._decode is None:
            return []
        ends = self._decode.cancel(request, cause, index)
        return self._post() + ends

    def turn(self, now: float, in_flight: list[int]) -> Turn:
        """Between two steps; ``in_flight`` are the numbers of those that were launched and have not landed."""
        for report in self._worker.poll():
            for half in self._halves:
                half.on_report(report, now)
        for half in self._halves:
            half.tick(now)
        if self._decode is not None:
            self._decode.advance(in_flight)
        submit = [] if self._prefills is None else self._prefills.start()
        deltas = self._post()
        return Turn(submit, [] if self._prefills is None else self._prefills.drain_aborts(), deltas)

    def told(self, deltas: list[Delta], now: float) -> list[Delta]:
        """Keep what steps did for other engines' prompts; the rest is for clients."""
        if self._prefills is None:
            return deltas
        self._prefills.take((delta for delta in deltas if delta.request < 0), now)
        self._post()
        return [delta for delta in deltas if delta.request >= 0]

    def observe(self, step: Step, seconds: float) -> None:
        """``step`` took so long: what a prompt's tokens cost here is learnt from steps of little else."""
        if self._decode is not None:
            tokens = sum(len(row.tokens) for row in step.rows if len(row.tokens) > 1)
            if tokens >= LEARN_TOKENS and tokens >= LEARN_SHARE * sum(len(row.tokens) for row in step.rows):
                self._decode.computed(tokens, seconds)

    def wait_s(self, now: float) -> float | None:
        """How long an idle core may wait; None is until something happens."""
        wake_at = min(half.wake_at for half in self._halves)
        return None if wake_at == float("inf") else max(0.0, wake_at - now)

    def close(self) -> None:
        self._worker.close()

    def _post(self) -> list[Delta]:
        orders: list[Order] = []
        deltas: list[Delta] = []
        if self._decode is not None:
            orders, deltas = self._decode.drain()
        if self._prefills is not None:
            orders += self._prefills.drain()
        if orders:
            self._worker.post(orders)
        return deltas

    def check(self) -> None:
        """Prove that transfers and the pages that they hold agree."""
        for half in self._halves:
            half.check()

    def statistics(self) -> dict[str, float]:
        found: dict[str, float] = {"transfer_pages": self._landing.pages}
        for half in self._halves:
            found |= half.statistics()
        return found
