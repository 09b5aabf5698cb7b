"""Who is next: priority with ageing first, then a fair share for each tenant, then arrival. Pure: no clock.

**Ageing.** A request that has waited for ``ageing_s`` seconds counts like a fresh one of the next higher
priority. Age grows at the same pace for all, so who is ahead of whom never changes with time, and a rank is a
constant: ``arrival / ageing_s - priority``, the smallest first.

**Shares.** Among waiting requests of one priority the tenant with the least service goes first: a virtual token
counter per tenant, raised by a weight for each token it was served (Sheng et al., *Fairness in Serving Large
Language Models*, OSDI 2024). Time that a tenant had nothing waiting earns nothing: when it comes back its
counter is lifted to the least of those that wait. So a tenant's backlog delays its own requests only. Age would
undo that, since a backlog is old; so it is compared between priorities and never within one: each priority
offers the request whose turn it is by shares, and the best ranked of those goes first.

A preempted request goes before everybody of its priority: its turn came already.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from streamengine.request import Sequence

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
"""What a token costs its tenant: an answer's takes a row of a step for itself."""

MAX_TENANTS = 10_000
"""Counters kept. Beyond, who has nothing waiting and was served longest ago is forgotten, and starts again."""


class _Priority:
    """Those who wait with one priority.

    ``turns`` is a heap with one entry ``(service, place, tenant)`` for each tenant that is in ``queues``, and
    perhaps for some that are no more. Both numbers only ever grow, so an entry is at worst too far in front:
    it is put right when it comes up.
    """

    def __init__(self) -> None:
        self.resumed: OrderedDict[Sequence, None] = OrderedDict()
        self.queues: dict[str, OrderedDict[Sequence, int]] = {}
        self.turns: list[tuple[float, int, str]] = []
        self.entered: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.resumed or self.queues)

    def push(self, sequence: Sequence, place: int, service: float) -> None:
        tenant = sequence.request.tenant
        self.queues.setdefault(tenant, OrderedDict())[sequence] = place
        if tenant not in self.entered:
            self.entered.add(tenant)
            heappush(self.turns, (service, place, tenant))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.resumed:
            del self.resumed[sequence]
            return
        tenant = sequence.request.tenant
        del self.queues[tenant][sequence]
        if not self.queues[tenant]:
            del self.queues[tenant]

    def tenant(self, service: dict[str, float]) -> str:
        """Whose turn it is; there must be somebody in ``queues``."""
        turns = self.turns
        while True:
            tenant = turns[0][2]
            queue = self.queues.get(tenant)
            if queue is None:
                heappop(turns)
                self.entered.remove(tenant)
                continue
            entry = (service[tenant], next(iter(queue.values())), tenant)
            if entry == turns[0]:
                return tenant
            heapreplace(turns, entry)

    def first(self, service: dict[str, float]) -> Sequence:
        return next(iter(self.resumed or self.queues[self.tenant(service)]))


class WaitingQueue:
    """The sequences that wait. Each call costs O(log tenants), `peek` and `pop` also O(priorities that wait).

    Args:
        ageing_s: seconds of waiting that are worth one level of priority.
    """

    def __init__(self, ageing_s: float) -> None:
        assert ageing_s > 0, f"ageing_s is {ageing_s}"
        self._ageing_s = ageing_s
        self._priorities: dict[int, _Priority] = {}
        self._service: OrderedDict[str, float] = OrderedDict()
        self._queued: dict[str, int] = {}
        self._last: str | None = None
        self._places = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, in the order of arrival within one tenant and priority."""
        for priority in sorted(self._priorities, reverse=True):
            level = self._priorities[priority]
            yield from level.resumed
            for queue in level.queues.values():
                yield from queue

    def push(self, sequence: Sequence) -> None:
        """Queue a new one. Pushes must come in the order of arrival."""
        tenant, level = sequence.request.tenant, self._level(sequence)
        if not self._queued.get(tenant):
            self._lift(tenant, level)
        self._places += 1
        self._count(tenant, +1)
        level.push(sequence, self._places, self._service[tenant])

    def push_front(self, sequence: Sequence) -> None:
        """Queue a preempted one. Of several, the last one goes first: the better ranked are preempted later."""
        level = self._level(sequence)
        self._service.setdefault(sequence.request.tenant, 0.0)
        self._count(sequence.request.tenant, +1)
        level.resumed[sequence] = None
        level.resumed.move_to_end(sequence, last=False)

    def peek(self) -> Sequence | None:
        """Whose turn it is."""
        if not self._length:
            return None
        firsts = [level.first(self._service) for level in self._priorities.values()]
        return firsts[0] if len(firsts) == 1 else min(firsts, key=self.rank)

    def pop(self) -> Sequence:
        """What `peek` gives, taken out. Tell `serve` of its prompt before the next `peek`."""
        sequence = self.peek()
        assert sequence is not None, "nobody waits"
        self.remove(sequence)
        self._last = sequence.request.tenant
        return sequence

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        level = self._priorities[priority]
        level.remove(sequence)
        if not level:
            del self._priorities[priority]
        self._count(sequence.request.tenant, -1)

    def serve(self, tenant: str, prompt_tokens: int, answer_tokens: int) -> None:
        """These tokens of ``tenant`` were or are being computed for the first time."""
        cost = PROMPT_WEIGHT * prompt_tokens + ANSWER_WEIGHT * answer_tokens
        self._service[tenant] = self._service.get(tenant, 0.0) + cost
        self._service.move_to_end(tenant)

    def rank(self, sequence: Sequence) -> tuple[float, float, int]:
        """The smaller the more important: who is preempted is the greatest of those who run."""
        request = sequence.request
        return sequence.arrival / self._ageing_s - request.priority, sequence.arrival, request.id

    def _level(self, sequence: Sequence) -> _Priority:
        return self._priorities.setdefault(sequence.request.priority, _Priority())

    def _lift(self, tenant: str, level: _Priority) -> None:
        """It had nothing waiting: start where those are who have, or who had last."""
        service = self._service
        if level.queues:
            floor = service[level.tenant(service)]
        else:
            floor = service.get(self._last, 0.0) if self._last is not None else 0.0
        service[tenant] = max(service.get(tenant, 0.0), floor)
        service.move_to_end(tenant)
        if len(service) > MAX_TENANTS:
            # An entry among the turns must not be ahead of its counter, which would start again from less.
            held = set(self._queued).union({tenant}, *(level.entered for level in self._priorities.values()))
            forgotten = next((other for other in service if other not in held), None)
            if forgotten is not None:
                del service[forgotten]

    def _count(self, tenant: str, change: int) -> None:
        self._length += change
        left = self._queued.get(tenant, 0) + change
        if left:
            self._queued[tenant] = left
        else:
            del self._queued[tenant]

    def check(self) -> None:
        """Prove that the counts and the queues agree."""
        sequences = list(self)
        assert len(sequences) == len(set(sequences)) == self._length, "a sequence is twice in the queue, or lost"
        tenants = [sequence.request.tenant for sequence in sequences]
        assert self._queued == {tenant: tenants.count(tenant) for tenant in set(tenants)}, "a tenant is miscounted"
        assert self._queued.keys() <= self._service.keys(), "a tenant waits without a counter"
        for priority, level in self._priorities.items():
            assert level, f"priority {priority} is empty"
            assert all(level.queues.values()) and level.queues.keys() <= level.entered, "a tenant will have no turn"
            assert level.entered == {tenant for _, _, tenant in level.turns}, "a turn is lost"
            assert len(level.entered) == len(level.turns), "a tenant has two turns"
            for service, place, tenant in level.turns:
                if tenant in level.queues:
                    now = self._service[tenant], next(iter(level.queues[tenant].values()))
                    assert (service, place) <= now, f"the turn of {tenant!r} comes too late"

    def statistics(self) -> dict[str, float]:
        """How many wait, how many of them were preempted, and of how many tenants."""
        return {
            "waiting": self._length,
            "waiting_preempted": sum(len(level.resumed) for level in self._priorities.values()),
            "waiting_tenants": len(self._queued),
        }
