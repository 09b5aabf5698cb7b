"""The prefill side: prompts of other engines, and their pages until they have been read. Pure; time is an argument.

A prompt is a request of one token for this engine's own scheduler, told from its clients' by an id below 0. When it has
its token its pages are held under a lease. Each word of the other engine about a transfer begins the lease anew, and
only its end or a `Release` gives the pages back: that a connection is lost does not, because pages can be read
without one.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import structs

from compiled.step import Logprob
from streamengine.errors import InvalidRequest, Overloaded, QueueTimeout
from streamengine.landing import Landing
from streamengine.request import Delta, Request
from streamengine.transfer.values import (
    Busy,
    Connected,
    Handle,
    Heartbeat,
    Held,
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

Checksums = Callable[[tuple[int, ...]], tuple[int, ...]]

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Prompt:
    transfer: str
    peer: str
    request: Request
    lease_s: float
    came: float
    expires: float
    running: bool = False
    given_up: bool = False
    """Nobody wants it any more; it is here until the scheduler has ended it."""
    handle: Handle | None = None
    queued_s: float = 0.0
    cached: int = 0


class Prefills:
    """
    Args:
        landing: the scheduler's.
        engine: who we are, in handles, and ``incarnation``.
        room: pages that prompts may have which run or are kept. Not shared with transfers to this engine: two engines
            that compute prompts for each other would wait for each other's room.
        most: prompts that may be here and have no token yet.
        vocab_size: of the model.
        checksums: of pages, where handles are to have them.
    """

    def __init__(
        self,
        landing: Landing,
        *,
        engine: str,
        incarnation: str,
        page_size: int,
        room: int,
        most: int,
        vocab_size: int,
        checksums: Checksums | None = None,
    ) -> None:
        self._landing = landing
        self._engine, self._incarnation = engine, incarnation
        self._page_size = page_size
        self._room = room
        self._most = most
        self._vocab_size = vocab_size
        self._checksums = checksums
        self._prompts: dict[str, _Prompt] = {}
        self._by_id: dict[int, _Prompt] = {}
        self._queue: deque[_Prompt] = deque()
        self._lent = 0
        """Of the room, by prompts from their start until they are forgotten."""
        self._peers: set[str] = set()
        self._mismatch = ""
        self._said = 0
        """What peers know of how busy this engine is."""
        self._orders: list[Order] = []
        self._aborts: list[int] = []
        self._counts: Counter[str] = Counter()
        self._last_id = 0

    # what time, the worker and the scheduler bring

    def on_report(self, report: Report, now: float) -> None:
        match report:
            case Connected(peer, dialed=False):
                self._peers.add(peer)
                if self._said:
                    self._orders.append(Send(peer, Busy(self._said)))
            case Received(peer, Prefill() as prefill):
                self._receive(peer, prefill, now)
            case Received(peer, Heartbeat(transfers, sent)):
                known = [self._prompts[t] for t in transfers if t in self._prompts and not self._prompts[t].given_up]
                for prompt in known:
                    prompt.expires = now + prompt.lease_s
                self._orders.append(Send(peer, Held(tuple(prompt.transfer for prompt in known), sent)))
            case Received(_, Release(transfer)):
                if released := self._prompts.get(transfer):
                    self._give_up(released)
            case Lost(peer, why, mismatch, dialed):
                self._peers.discard(peer)
                if mismatch and not dialed:
                    self._counts["mismatches"] += 1
                    # The other one comes again and again, each time under a new name.
                    level = logging.DEBUG if why == self._mismatch else logging.ERROR
                    _logger.log(level, "prefills for %s are refused: %s", peer, why)
                    self._mismatch = why
                for prompt in list(self._prompts.values()):
                    if prompt.peer == peer and prompt.handle is None:
                        self._give_up(prompt)

    def tick(self, now: float) -> None:
        """Give up what nobody has asked for within its lease."""
        for prompt in list(self._prompts.values()):
            if prompt.expires <= now and not prompt.given_up:
                self._counts["expired"] += 1
                _logger.warning("the lease of %s for %s has run out", prompt.transfer, prompt.peer)
                self._refuse(prompt.peer, prompt.transfer, QueueTimeout.code, "the lease has run out")
                self._give_up(prompt)

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do, if nothing happens before."""
        return min((p.expires for p in self._prompts.values() if not p.given_up), default=float("inf"))

    def start(self) -> list[Request]:
        """Prompts whose turn it is: for what they will hold there is room."""
        begun = []
        while self._queue:
            pages = self._pages(self._queue[0])
            if self._lent + pages > self._room:
                break
            prompt = self._queue.popleft()
            self._lent += pages
            prompt.running = True
            begun.append(prompt.request)
        return begun

    def take(self, deltas: Iterable[Delta], now: float) -> None:
        """What steps did for requests with an id below 0."""
        for delta in deltas:
            prompt = self._by_id[delta.request]
            if delta.queued_s is not None:
                prompt.queued_s, prompt.cached = delta.queued_s, delta.cached
            if delta.finish is not None:
                self._end(prompt, delta, now)

    def drain(self) -> list[Order]:
        """What the worker is to do, since the last call."""
        # A word to everybody for each doubling and halving: peers need the order of magnitude.
        waiting = self._waiting
        if waiting > 2 * self._said + 1 or 2 * waiting < self._said:
            self._said = waiting
            self._orders += [Send(peer, Busy(waiting)) for peer in sorted(self._peers)]
        orders, self._orders = self._orders, []
        return orders

    def drain_aborts(self) -> list[int]:
        """Ids of requests that are to be aborted, since the last call."""
        aborts, self._aborts = self._aborts, []
        return aborts

    # inside

    def _receive(self, peer: str, prefill: Prefill, now: float) -> None:
        transfer, request = prefill.transfer, prefill.request
        self._counts["received"] += 1
        if twice := self._prompts.get(transfer):
            if twice.handle is not None:
                twice.peer, twice.expires = peer, now + twice.lease_s
                self._orders.append(Send(peer, Prefilled(twice.handle)))
            return
        if wrong := self._wrong(request):
            self._refuse(peer, transfer, InvalidRequest.code, wrong)
            return
        if self._waiting >= self._most:
            self._refuse(peer, transfer, Overloaded.code, f"{self._waiting} prompts are here, at most {self._most}")
            return
        self._last_id -= 1
        request = structs.replace(request, id=self._last_id, transfer=transfer)
        prompt = _Prompt(transfer, peer, request, prefill.lease_s, now, now + prefill.lease_s)
        self._prompts[transfer] = self._by_id[request.id] = prompt
        self._queue.append(prompt)

    @property
    def _waiting(self) -> int:
        """Prompts that have no token yet."""
        return sum(prompt.handle is None for prompt in self._prompts.values())

    def _wrong(self, request: Request) -> str:
        """Why ``request`` is none to be computed for another engine; empty if it is."""
        for name, most in (("max_tokens", 1), ("n", 1), ("beam_width", 0), ("speculate", 0)):
            if (value := getattr(request, name)) != most:
                return f"{name} of a prefill is {most}, not {value}"
        if request.answered or request.prompt_logprobs is not None:
            return "a prefill has neither answered tokens nor prompt_logprobs"
        if not request.prompt or not 0 <= min(request.prompt) <= max(request.prompt) < self._vocab_size:
            return f"a prefill has tokens, each below {self._vocab_size}"
        if (pages := -(-len(request.prompt) // self._page_size)) > self._room:
            return f"a prompt of {pages} pages; at most {self._room} can be kept"
        return ""

    def _end(self, prompt: _Prompt, delta: Delta, now: float) -> None:
        finish = delta.finish
        assert finish is not None
        del self._by_id[delta.request]
        pages = self._landing.kept(prompt.transfer)
        if prompt.given_up or pages is None or finish.reason not in ("stop", "length"):
            if not prompt.given_up:
                self._refuse(prompt.peer, prompt.transfer, finish.cause, finish.message or "it was cancelled")
            self._forget(prompt)
            return
        prompt.handle = self._handle(prompt, pages, delta.tokens[0], delta.logprobs, now)
        self._counts["done"] += 1
        self._orders.append(Send(prompt.peer, Prefilled(prompt.handle)))

    def _handle(
        self, prompt: _Prompt, pages: tuple[int, ...], first: int, logprobs: tuple[Logprob, ...], now: float
    ) -> Handle:
        return Handle(
            transfer=prompt.transfer,
            engine=self._engine,
            incarnation=self._incarnation,
            pages=pages,
            tokens=len(prompt.request.prompt),
            first=first,
            logprob=logprobs[0] if logprobs else None,
            queued_s=prompt.queued_s,
            seconds=now - prompt.came,
            cached=prompt.cached,
            checksums=None if self._checksums is None else self._checksums(pages),
        )

    def _give_up(self, prompt: _Prompt) -> None:
        if prompt.given_up:
            return
        prompt.given_up = True
        if prompt.handle is None and prompt.running:
            self._aborts.append(prompt.request.id)  # its end comes as a delta
            return
        if prompt.handle is None:
            self._queue.remove(prompt)
            del self._by_id[prompt.request.id]
        self._forget(prompt)

    def _forget(self, prompt: _Prompt) -> None:
        self._landing.drop(prompt.transfer)
        del self._prompts[prompt.transfer]
        if prompt.running:
            self._lent -= self._pages(prompt)

    def _refuse(self, peer: str, transfer: str, code: str, message: str) -> None:
        self._counts["refused"] += 1
        self._orders.append(Send(peer, Refused(transfer, code, message)))

    def _pages(self, prompt: _Prompt) -> int:
        return -(-len(prompt.request.prompt) // self._page_size)

    def check(self) -> None:
        """Prove that what is kept is kept for a prompt that was computed, and the other way round."""
        done = {prompt.transfer for prompt in self._prompts.values() if prompt.handle is not None}
        assert done == self._landing.kept_for, f"for {self._landing.kept_for} pages are kept, {done} were computed"
        running = [prompt for prompt in self._prompts.values() if prompt.running]
        assert self._lent == sum(map(self._pages, running)) <= self._room, f"{self._lent} pages are lent"

    def statistics(self) -> dict[str, float]:
        """``prefills_…``: prompts of other engines, and the pages that are held for them."""
        names = ("received", "done", "refused", "expired", "mismatches")
        return {
            **{f"prefills_{name}": self._counts[name] for name in names},
            "prefills_waiting": self._waiting,
            "prefills_held": len(self._prompts) - self._waiting,
        }
