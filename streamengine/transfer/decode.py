"""The decode side: requests whose prompt another engine computes. A pure state machine; time is an argument.

::

    offer ─▶ COMPUTING ─ Prefilled ─▶ ROOM ─ pages ─▶ SETTLING ─ steps over ─▶ POSTED ─ Landed ─▶ the waiting queue
                │                      │                 │                       │
                └──────────────────────┴─────────────────┴───────────────────────┴─▶ fallback, or the end

A request is here from its arrival until it enters the scheduler's waiting queue, with its prompt's pages or, whatever
went wrong, without; until then it has neither a seat nor pages. Its first token goes out when the handle comes.

Pages to land in are the transfer's own. They may still be written by steps that were in flight when they were taken,
so a read begins when those are over (SETTLING). And there is no way to stop a read: one whose request has gone on
without it, or has ended, is a zombie, whose pages are given to nobody before `Landed` or `Failed` says that nothing
writes there any more.

What landed counts only if the peer surely held its pages until then: by our clock, within the lease of the last word
that the peer is known to have read.
"""

import logging
from collections import Counter, deque
from math import inf
from typing import Literal

from msgspec import structs

from streamengine.errors import EngineFailure, Overloaded
from streamengine.landing import Landing, goes_on
from streamengine.request import QUEUE_TIMEOUT, Delta, Finish, Sequence
from streamengine.transfer.choose import Threshold, choose, key_of
from streamengine.transfer.remote import Phase, Remote, ends, prompt_of, read_of, wrong_in
from streamengine.transfer.values import (
    Busy,
    Card,
    Connected,
    Failed,
    Handle,
    Heartbeat,
    Held,
    Landed,
    Lost,
    Order,
    Prefill,
    Prefilled,
    Received,
    Refused,
    Release,
    Report,
    Send,
)

BEATS = 3
"""Heartbeats in a lease."""

OnFailure = Literal["recompute", "fail"]

TOLD = {
    "no_peer": "no engine for prefills is connected",
    "refused": "the engine that was asked refused it",
    "lost": "the connection to the engine that was asked is lost",
    "deadline": "it took too long",
    "failed": "its pages could not be read",
    "lease": "its pages may have been given away before they were read",
}
"""What a client learns of a failure. Which peer it was, and where, is for the log."""

_logger = logging.getLogger(__name__)


class Decode:
    """
    Args:
        landing: the scheduler's.
        threshold: from how many uncached tokens on a prompt is computed elsewhere.
        room: pages that transfers to this engine, and requests that wait with what has landed, may have.
        name: unique among all engines and restarts.
        on_failure: what becomes of a request whose remote prefill fails: it is computed here, or ends in an error. A
            peer or a pool that is full is no failure; then it is computed here in any case.
    """

    def __init__(
        self,
        landing: Landing,
        threshold: Threshold,
        *,
        room: int,
        name: str,
        page_size: int,
        page_bytes: int,
        lease_s: float,
        deadline_s: float,
        on_failure: OnFailure,
    ) -> None:
        self._landing = landing
        self._threshold = threshold
        self._room = room
        self._name = name
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._lease_s = lease_s
        self._deadline_s = deadline_s
        self._on_failure = on_failure
        self._peers: dict[str, Card] = {}
        self._busy: dict[str, int] = {}
        self._remotes: dict[str, Remote] = {}
        self._by_request: dict[int, Remote] = {}
        self._rooms: deque[Remote] = deque()
        self._zombies: set[str] = set()
        self._orders: list[Order] = []
        self._deltas: list[Delta] = []
        self._transfers = 0
        self._beat_at = inf
        self._read_s = 0.0
        self._counts: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._remotes)

    @property
    def unfinished(self) -> list[int]:
        return list(self._by_request)

    # requests

    def offer(self, sequence: Sequence, now: float) -> bool:
        """Take a new request over, if its prompt is to be computed elsewhere. `Scheduler.check_room` let it pass."""
        request = sequence.request
        if request.prompt_logprobs is not None or request.answered:
            return False  # the one needs every row of the prompt, the other is behind its prompt already
        if not self._landing.can_begin(sequence):
            return False
        if not self._threshold.worth(self._landing.uncached(sequence)):
            return False
        if -(-len(request.prompt) // self._page_size) > self._room:
            self._counts["too_long"] += 1
            return False
        peer = choose(key_of(request.tenant, request.prompt, self._page_size), self._loads())
        if peer is None:
            return self._give_up(sequence, "no_peer", TOLD["no_peer"], failure=True)
        self._transfers += 1
        transfer = f"{self._name}/{self._transfers}"
        remote = Remote(transfer, peer, self._peers[peer], sequence, now, now + self._deadline_s, heard=now, asked=-inf)
        self._remotes[transfer] = self._by_request[request.id] = remote
        self._orders.append(Send(peer, Prefill(transfer, prompt_of(request, transfer), self._lease_s)))
        self._beat_at = min(self._beat_at, now + self._lease_s / BEATS)
        self._counts["sent"] += 1
        return True

    def cancel(self, request: int, cause: str, index: int | None = None) -> list[Delta]:
        """See `Scheduler.abort`."""
        remote = self._by_request.get(request)
        if remote is None or (cause == QUEUE_TIMEOUT and remote.handle is not None):
            return []
        sequence = remote.sequence
        if index is not None and not (sequence.answered and index == 0):
            return []
        self._leave(remote)
        self._counts["cancelled"] += 1
        return ends(sequence, Finish("cancelled", cause))

    def computed(self, tokens: int, seconds: float) -> None:
        """See `Threshold.computed`."""
        self._threshold.computed(tokens, seconds)

    # what time and the worker bring

    def tick(self, now: float) -> None:
        """Let deadlines pass and hearts beat."""
        for remote in list(self._remotes.values()):
            if remote.deadline > now:
                break  # they came in this order
            why = f"the prefill by {remote.peer} was not over after {self._deadline_s:g} s: {remote.phase.value}"
            if remote.phase in (Phase.ROOM, Phase.SETTLING):
                self._fall_back(remote, "no_room", why, failure=False)
            else:
                self._fall_back(remote, "deadline", why)
        if now < self._beat_at:
            return
        wanted: dict[str, list[str]] = {}
        for remote in self._remotes.values():
            if remote.peer in self._peers:
                wanted.setdefault(remote.peer, []).append(remote.transfer)
                remote.asked = now
        self._orders += [Send(peer, Heartbeat(tuple(transfers), now)) for peer, transfers in wanted.items()]
        self._beat_at = now + self._lease_s / BEATS if self._remotes else inf

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do, if nothing happens before."""
        first = next(iter(self._remotes.values()), None)
        return inf if first is None else min(first.deadline, self._beat_at)

    def on_report(self, report: Report, now: float) -> None:
        match report:
            case Connected(peer, card, dialed=True):
                self._peers[peer] = card
                _logger.info("prefills go to %s, incarnation %s", peer, card.incarnation)
            case Lost(peer, why, mismatch, dialed=True):
                self._lose(peer, why, mismatch)
            case Received(peer, Prefilled(handle)):
                self._take_in(peer, handle, now)
            case Received(peer, Refused(transfer, code, message)):
                remote = self._remotes.get(transfer)
                if remote is not None and remote.peer == peer:
                    self._fall_back(remote, "refused", f"{peer}: {message}", failure=code != Overloaded.code)
            case Received(peer, Busy(waiting)):
                self._busy[peer] = waiting
            case Received(peer, Held(transfers, sent)):
                self._hear(peer, set(transfers), sent)
            case Landed(transfer, seconds):
                self._land(transfer, seconds, now)
            case Failed(transfer, why):
                self._landing.drop(transfer)
                if transfer in self._zombies:
                    self._zombies.remove(transfer)
                else:
                    remote = self._remotes[transfer]
                    remote.phase = Phase.ROOM
                    self._fall_back(remote, "failed", f"the pages could not be read from {remote.peer}: {why}")

    def advance(self, in_flight: list[int]) -> None:
        """Give pages to those that wait for them, and read into those that no step writes any more.

        ``in_flight`` are the numbers of the steps that are, the oldest one first.
        """
        newest = in_flight[-1] if in_flight else 0
        while self._rooms:
            remote = self._rooms[0]
            if remote.phase is Phase.ROOM and remote.transfer in self._remotes and not self._claim(remote, newest):
                break
            self._rooms.popleft()
        for remote in self._remotes.values():
            if remote.phase is Phase.SETTLING and (not in_flight or in_flight[0] > remote.barrier):
                remote.phase = Phase.POSTED
                self._orders.append(read_of(remote))

    def drain(self) -> tuple[list[Order], list[Delta]]:
        """What the worker is to do and what clients are to be told, since the last call."""
        orders, deltas = self._orders, self._deltas
        self._orders, self._deltas = [], []
        return orders, deltas

    # inside

    def _loads(self) -> dict[str, int]:
        """Prompts under way at each peer: ours, or as many as it has told of."""
        loads = dict.fromkeys(self._peers, 0)
        for remote in self._remotes.values():
            if remote.peer in loads:
                loads[remote.peer] += 1
        return {peer: max(load, self._busy.get(peer, 0)) for peer, load in loads.items()}

    def _lose(self, peer: str, why: str, mismatch: bool) -> None:
        self._counts["mismatches"] += mismatch
        self._busy.pop(peer, None)
        if self._peers.pop(peer, None) is None and not mismatch:
            _logger.warning("no prefills by %s: %s", peer, why)
        else:
            _logger.error("no more prefills by %s: %s", peer, why)
        for remote in list(self._remotes.values()):
            # What is being read may well arrive; its end is reported.
            if remote.peer == peer and remote.phase is not Phase.POSTED:
                self._fall_back(remote, "lost", f"{peer} is gone: {why}")

    def _take_in(self, peer: str, handle: Handle, now: float) -> None:
        remote = self._remotes.get(handle.transfer)
        if remote is None or remote.peer != peer or remote.handle is not None:
            return  # late, or twice
        if now >= remote.deadline:
            return  # `tick` says that it is the peer that was late, and not that there is no room
        sequence = remote.sequence
        if wrong := wrong_in(handle, remote, self._page_size):
            self._fall_back(remote, "failed", f"{peer} gave a handle that is none: {wrong}")
            return
        remote.handle, sequence.begun = handle, True
        if goes_on(sequence):
            delta = self._landing.begin(sequence, handle.first, handle.logprob, handle.queued_s, handle.cached)
            self._deltas.append(structs.replace(delta, remote="done"))
            if delta.finish is not None:
                self._counts["landed"] += 1
                self._leave(remote)
                return
        else:
            sequence.queued_s, sequence.cached = handle.queued_s, handle.cached
        remote.phase = Phase.ROOM
        self._rooms.append(remote)

    def _claim(self, remote: Remote, newest: int) -> bool:
        assert remote.handle is not None
        pairs = self._landing.claim(remote.transfer, remote.sequence, remote.handle.pages, self._room)
        if pairs is None:
            return False
        remote.pairs, remote.barrier, remote.phase = pairs, newest, Phase.SETTLING
        if not pairs:  # all of it was in the prefix cache
            self._enter(remote)
        return True

    def _hear(self, peer: str, held: set[str], sent: float) -> None:
        for remote in list(self._remotes.values()):
            if remote.peer != peer or remote.asked < sent:
                continue
            if remote.transfer in held:
                remote.heard = max(remote.heard, sent)
            elif remote.asked == sent:
                self._fall_back(remote, "lease", f"{peer} does not hold it any more")

    def _land(self, transfer: str, seconds: float, now: float) -> None:
        if transfer in self._zombies:
            self._zombies.remove(transfer)
            self._landing.drop(transfer)
            return
        remote = self._remotes[transfer]
        if now >= remote.heard + self._lease_s:
            self._landing.drop(transfer)
            remote.phase = Phase.ROOM
            self._fall_back(remote, "lease", f"{remote.peer} may have given the pages away before they were read")
            return
        assert remote.handle is not None
        moved = len(remote.pairs) * self._page_bytes
        self._threshold.moved(moved, seconds, now - remote.sent - remote.handle.seconds - seconds)
        self._counts["bytes"] += moved
        self._read_s += seconds
        self._enter(remote)

    def _enter(self, remote: Remote) -> None:
        sequence = remote.sequence
        self._counts["landed"] += 1
        if not goes_on(sequence):
            self._deltas.append(Delta(request=sequence.request.id, remote="done"))
        self._deltas += self._landing.enter(sequence, remote.transfer)
        remote.phase = Phase.ROOM  # it holds nothing any more
        self._leave(remote)

    def _fall_back(self, remote: Remote, code: str, why: str, *, failure: bool = True) -> None:
        self._leave(remote)
        if not self._give_up(remote.sequence, code, why, failure=failure):
            self._deltas += self._landing.enter(remote.sequence)

    def _give_up(self, sequence: Sequence, code: str, why: str, *, failure: bool) -> bool:
        """Count and tell it. True: that was the request's end."""
        self._fallbacks[code] += 1
        # That nobody is connected was said when it came to be so, and need not be said for each request.
        loud = failure and code != "no_peer"
        _logger.log(logging.WARNING if loud else logging.INFO, "request %d: %s", sequence.request.id, why)
        if failure and self._on_failure == "fail":
            text = f"the prompt could not be computed elsewhere: {TOLD[code]}"
            self._deltas += ends(sequence, Finish("error", EngineFailure.code, text))
            return True
        self._deltas.append(Delta(request=sequence.request.id, remote=code))
        return False

    def _leave(self, remote: Remote) -> None:
        """The request is no longer here; a read that goes on keeps its pages."""
        del self._remotes[remote.transfer], self._by_request[remote.sequence.request.id]
        if remote.phase is Phase.POSTED:
            self._zombies.add(remote.transfer)
        else:
            self._landing.drop(remote.transfer)
        self._orders.append(Send(remote.peer, Release(remote.transfer)))

    def check(self) -> None:
        """Prove that every transfer which may have pages has them, and no other."""
        having = {r.transfer for r in self._remotes.values() if r.phase in (Phase.SETTLING, Phase.POSTED)}
        assert not having & self._zombies, "a zombie has a request"
        found, ours = self._landing.transfers, having | self._zombies
        assert found == ours, f"{found} hold pages, {having} and zombies {self._zombies} should"
        assert self._landing.held <= self._room, "more pages are held than may be"
        assert len(self._by_request) == len(self._remotes), "a request has two transfers"

    def statistics(self) -> dict[str, float]:
        """``remote_…``: how many prefills were sent and came to something, bytes, and why others did not."""
        names = ("sent", "landed", "cancelled", "bytes", "mismatches", "too_long")
        return {
            **{f"remote_{name}": self._counts[name] for name in names},
            **{f"remote_fallbacks_{code}": count for code, count in self._fallbacks.items()},
            "remote_read_s": self._read_s,
            "remote_waiting": len(self._remotes),
            "remote_zombies": len(self._zombies),
            "remote_peers": len(self._peers),
            **self._threshold.statistics(),
        }
