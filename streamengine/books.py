"""Who is here, who runs, and who holds which pages: the scheduler's books. They are changed here and nowhere else.

Nothing is decided here. Every method leaves the books balanced; `check` proves it.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from compiled.step import PADDING_PAGE
from streamengine.groups import BeamSearch, fork, seats, seed_of
from streamengine.guided.grammar import Constraint
from streamengine.kv import KVPool
from streamengine.prefix import Entry
from streamengine.request import Delta, Event, Request, Sequence, State
from streamengine.rows import continue_answer, delta_of
from streamengine.speculation import Lookup
from streamengine.waiting import WaitingQueue

_by_rank = attrgetter("rank")


class Books:
    """Every unfinished request, its sequences and their pages.

    Args:
        pool: nobody else takes pages from it.
        ageing_s: see `WaitingQueue`.
        window: see `KVSpec`.
    """

    def __init__(self, pool: KVPool, ageing_s: float, window: int | None) -> None:
        self.pool = pool
        self.waiting = WaitingQueue(ageing_s)
        self.running: list[Sequence] = []
        """The most important first."""
        self.requests: dict[int, list[Sequence]] = {}
        """The unfinished sequences of each request, oldest request first; beams in their order."""
        self.searches: dict[int, BeamSearch] = {}
        self.holds: dict[str, tuple[int, ...]] = {}
        """The page tables that transfers to this engine hold, each entry by itself: see `Landing`."""
        self.kept: dict[str, tuple[int, ...]] = {}
        """Those of prompts that were computed for other engines."""
        self.window = window
        self._copied: tuple[int, ...] = ()

    def enter(self, request: Request, now: float, constraint: Constraint | None = None) -> Sequence:
        """The first sequence of a new request. It is not here before `queue`."""
        sequence = Sequence(request, arrival=now, tokens=list(request.prompt))
        sequence.rank = (*self.waiting.rank(sequence), 0)
        sequence.most_pages = self.pool.pages_for(sequence.reach)
        sequence.unborn = seats(request) - 1
        if self.pool.prefix is not None:
            sequence.chain = self.pool.prefix.chain(request.tenant)
        if request.beam_width:
            sequence.sampling = replace(request.sampling, temperature=0.0, logprobs=2 * request.beam_width)
        elif request.speculate and not sequence.needs_history:
            sequence.lookup = Lookup()
        sequence.constraint = constraint
        sequence.lockstep = bool(request.beam_width) or sequence.lookup is not None
        return sequence

    def queue(self, sequence: Sequence) -> list[Delta]:
        """Let it wait; what its answer's beginning leads to without a step. Raises `InvalidRequest`."""
        request = sequence.request
        begun = continue_answer(sequence) if request.answered else None
        if begun is not None and begun.finish is not None:
            return [delta_of(sequence, 0, begun.tokens, begun.finish, forced=begun.forced)]
        self.requests[request.id] = [sequence]
        if request.beam_width:
            self.searches[request.id] = BeamSearch(request)
        if sequence.begun:
            self.waiting.push_front(sequence)  # its turn came already
        else:
            self.waiting.push(sequence)
        if begun is None or not begun.tokens:
            return []
        return [delta_of(sequence, 0, begun.tokens, forced=begun.forced)]

    @property
    def seats(self) -> int:
        """Taken by those who run and by their forks to come."""
        return len(self.running) + sum(sequence.unborn for sequence in self.running)

    def growth(self, sequence: Sequence, pages: int) -> int:
        """What it may want beyond ``pages`` within a page of tokens; a fork wants its copy and the page behind it."""
        wanted = min(1 + (sequence.copy_from is not None), sequence.most_pages - pages)
        if sequence.unborn:
            shared = (len(sequence.request.prompt) - 1) // self.pool.page_size
            wanted += sequence.unborn * min(2, sequence.most_pages - shared)
        return wanted

    def find(self, sequence: Sequence) -> list[Entry]:
        """What the prefix cache has of a sequence that waits: at least one token is left to compute.

        Log-probabilities of a prompt need all of it to be computed.
        """
        prefix, request = self.pool.prefix, sequence.request
        if prefix is None or sequence.chain is None or sequence.landed:
            return []
        if request.prompt_logprobs is not None and sequence.scored < len(request.prompt) - 1:
            return []
        return prefix.find(sequence.chain, sequence.tokens, len(sequence.tokens) - 1)

    def admit(self, found: list[Entry], step: int) -> None:
        """Let the one whose turn it is run from step number ``step`` on, with pages for all that is known of it."""
        pool, sequence = self.pool, self.waiting.pop()
        shared = tuple(entry.page for entry in found)
        pool.share(shared)  # before they could be evicted
        had = shared + sequence.landed
        pages = pool.take(pool.pages_for(len(sequence.tokens)) - len(had))
        assert pages is not None, f"request {sequence.request.id} does not fit an empty pool"
        sequence.pages = had + tuple(pages)
        sequence.computed = sequence.landed_tokens or len(found) * pool.page_size
        if sequence.landed:
            sequence.landed = ()
            self.land(sequence, sequence.computed)
        elif pool.prefix is not None and sequence.chain is not None:
            pool.prefix.enter(sequence.chain, found, len(sequence.tokens))
        sequence.since = step
        sequence.apply(Event.ADMIT)
        insort(self.running, sequence, key=_by_rank)

    def preempt(self) -> None:
        """The last in rank loses its pages and waits in front of its priority; a beam search begins again.

        A token that a step in flight samples for it is still awaited: it was computed while the pages were its own.
        """
        victim = self.running[-1]
        if victim.request.id in self.searches:
            victim = self._restart_search(victim.request)
        self.running.pop()
        victim.apply(Event.PREEMPT)
        self._vacate(victim)
        victim.preemptions += 1
        self.waiting.push_front(victim)

    def _restart_search(self, request: Request) -> Sequence:
        first, *others = self.requests[request.id]
        self.remove(others)
        self.searches[request.id] = BeamSearch(request)
        del first.tokens[len(request.prompt) :]
        first.total, first.top, first.unborn = 0.0, (), seats(request) - 1
        first.index, first.rank = 0, (*first.rank[:-1], 0)
        if first.chain is not None:
            first.chain.cut(len(first.tokens) // self.pool.page_size)
        return first

    def bear(self, parent: Sequence) -> None:
        """The other answers of a request whose prompt is being computed; each computes its last token again."""
        request = parent.request
        for index in range(1, request.n):
            child = fork(parent, index, len(request.prompt) - 1, self.pool)
            child.sampling = replace(request.sampling, seed=seed_of(request.sampling.seed, index))
            child.lookup = parent.lookup and Lookup()
            self.requests[request.id].append(child)
            insort(self.running, child, key=_by_rank)
        parent.unborn = 0

    def branch(self, request: Request) -> bool:
        """One round of a beam search, all of whose beams have their likeliest tokens. False: it is over."""
        beams, prompt = self.requests[request.id], len(request.prompt)
        branches = self.searches[request.id].advance([(tuple(s.tokens[prompt:]), s.total, s.top) for s in beams])
        if not branches:
            return False
        heirs: list[Sequence] = []
        index = max(beam.index for beam in beams)
        for place in branches:
            heir = beams[place.parent]
            if heir in heirs:
                index += 1
                heir = fork(heir, index, heir.computed, self.pool)
                insort(self.running, heir, key=_by_rank)
            heirs.append(heir)
        for heir, place in zip(heirs, branches, strict=True):  # not before all forks have copied the tokens
            heir.tokens.append(place.token)
            heir.total, heir.top, heir.unborn = place.total, (), 0
        self.remove([beam for beam in beams if beam not in heirs])
        heirs[0].unborn = request.beam_width - len(heirs)
        self.requests[request.id] = heirs
        return True

    def land(self, sequence: Sequence, computed: int) -> None:
        """``computed`` of its tokens are known to have their KV in its pages."""
        pool = self.pool
        if pool.prefix is not None and sequence.chain is not None:
            pool.prefix.add(sequence.chain, sequence.tokens, sequence.pages, computed)
        if self.window is not None:
            gone = max(0, computed - self.window + 1) // pool.page_size
            pool.free(sequence.pages[:gone])
            sequence.pages = (PADDING_PAGE,) * gone + sequence.pages[gone:]

    def hold_copied(self, pages: tuple[int, ...]) -> None:
        """A step copies ``pages``: what held them holds them until `let_go`, when the step has been submitted."""
        assert not self._copied
        self._copied = pages

    def let_go(self) -> None:
        self.pool.free(self._copied)
        self._copied = ()

    def hold(self, transfer: str, pages: tuple[int, ...]) -> None:
        """``pages``, which are held already, are ``transfer``'s from now on."""
        assert transfer not in self.holds, f"transfer {transfer} holds pages already"
        self.holds[transfer] = pages

    def drop(self, transfer: str) -> None:
        """Give up what ``transfer`` holds, and what is kept for it, if anything."""
        self.pool.free(self.holds.pop(transfer, ()))
        self.pool.free(self.kept.pop(transfer, ()))

    @property
    def held(self) -> int:
        """Entries of the page tables that transfers to this engine hold, or that landed and wait for their turn."""
        tables = chain(self.holds.values(), (sequence.landed for sequence in self.waiting))
        return sum(len(pages) - pages.count(PADDING_PAGE) for pages in tables if pages)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """They have ended."""
        for sequence in sequences:
            if sequence.request.transfer and sequence.answered:
                self.kept[sequence.request.transfer] = sequence.pages
                self.pool.share(sequence.pages)
            if sequence.state is State.WAITING:
                self.waiting.remove(sequence)
            sequence.apply(Event.FINISH)
            self._vacate(sequence)
            id = sequence.request.id
            self.requests[id] = [other for other in self.requests[id] if other is not sequence]
            if not self.requests[id]:
                del self.requests[id]
                self.searches.pop(id, None)
        self.running[:] = [sequence for sequence in self.running if sequence.state is State.RUNNING]

    def _vacate(self, sequence: Sequence) -> None:
        self.pool.free(sequence.pages + sequence.landed)
        if sequence.copy_from is not None:
            self.pool.free((sequence.copy_from,))
        sequence.pages, sequence.landed, sequence.copy_from, sequence.computed = (), (), None, 0
        if sequence.chain is not None:
            sequence.chain.restart()

    def has_started(self, request_id: int) -> bool:
        """Whether a step was ever planned for the request, here or by whoever computed its prompt."""
        here = self.requests.get(request_id, ())
        return any(s.preemptions or s.begun or s.state is State.RUNNING for s in here)

    def check(self, max_num_seqs: int) -> None:
        """Prove that sequences, queues and pages agree."""
        running, waiting, size = self.running, list(self.waiting), self.pool.page_size
        self.waiting.check()
        here = [sequence for sequences in self.requests.values() for sequence in sequences]
        assert len(here) == len(set(here)) == len(running) + len(waiting), "a sequence is in two places"
        assert set(here) == {*running, *waiting}, "a sequence is lost"
        assert self.searches.keys() == {s.request.id for s in here if s.request.beam_width}, "a beam search is lost"
        assert running == sorted(running, key=_by_rank), "those who run are out of order"
        assert self.seats <= max_num_seqs, f"{self.seats} seats are taken"
        for s in waiting:
            assert s.state is State.WAITING and not s.pages and s.computed == 0 and s.copy_from is None, f"{s} waits"
        for s in running:
            assert s.state is State.RUNNING and s.computed <= s.known <= s.reach + 1, f"{s} runs"
            covered = len(s.pages) * size
            assert s.computed <= covered + (s.copy_from is not None) * (size - 1), f"{s} has {covered} slots"
            assert len(s.pages) <= s.most_pages, f"{s} has more pages than it can need"
        written = [page for s in running for page in s.pages[s.computed // size :]]
        tables = [page for s in running for page in s.pages]
        assert all(tables.count(page) == 1 for page in written), "a page that is yet to be written is shared"
        copied = [s.copy_from for s in running if s.copy_from is not None]
        held = chain(*self.holds.values(), *self.kept.values(), *(s.landed for s in waiting))
        self.pool.check(chain(tables, copied, self._copied, held))
