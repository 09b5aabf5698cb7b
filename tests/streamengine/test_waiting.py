"""The waiting order alone: sequences that only have a tenant, a priority and an arrival."""

from random import Random
from time import perf_counter

import pytest

from streamengine import waiting
from streamengine.request import Request, Sequence
from streamengine.waiting import WaitingQueue
from tests.fakes import GREEDY

AGEING_S = 60.0


@pytest.fixture
def queue():
    return WaitingQueue(AGEING_S)


def arrive(id, *, tenant="", priority=0, at=None):
    request = Request(id=id, prompt=(1,), max_tokens=1, sampling=GREEDY, tenant=tenant, priority=priority)
    return Sequence(request, arrival=float(id) if at is None else at, tokens=[1])


def drain(queue, cost=1):
    """Ids in the order in which they are admitted, each served ``cost`` prompt tokens."""
    order = []
    while queue:
        queue.check()
        assert queue.peek() is queue.peek()
        sequence = queue.pop()
        queue.serve(sequence.request.tenant, cost, 0)
        order.append(sequence.request.id)
    queue.check()
    return order


def test_among_equals_it_is_first_come_first_served(queue):
    for id in range(1, 21):
        queue.push(arrive(id))
    assert [sequence.request.id for sequence in queue] == list(range(1, 21))
    assert drain(queue) == list(range(1, 21))


def test_an_empty_queue_has_nobody(queue):
    assert queue.peek() is None
    assert len(queue) == 0


def test_a_higher_priority_goes_first(queue):
    for id, priority in enumerate([0, 5, -1, 5, 0], 1):
        queue.push(arrive(id, priority=priority))
    assert drain(queue) == [2, 4, 1, 5, 3]


def test_a_wait_of_ageing_s_is_worth_one_priority(queue):
    queue.push(arrive(1, priority=0, at=0.0))
    queue.push(arrive(2, priority=1, at=AGEING_S - 1))
    queue.push(arrive(3, priority=1, at=AGEING_S + 1))
    assert drain(queue) == [2, 1, 3]


def test_a_low_priority_is_not_starved_by_a_stream_of_high_ones(queue):
    queue.push(arrive(1, priority=0, at=0.0))
    for id in range(2, 100):
        queue.push(arrive(id, priority=3, at=float(10 * id)))
        if queue.pop().request.priority == 0:
            break
    assert 10 * id == pytest.approx(3 * AGEING_S, abs=20)


def test_tenants_take_turns_by_the_tokens_they_were_served(queue):
    for id in range(1, 9):
        queue.push(arrive(id, tenant="a" if id <= 6 else "b"))
    assert drain(queue) == [1, 7, 2, 8, 3, 4, 5, 6]


def test_an_answer_token_costs_a_tenant_twice_a_prompt_token(queue):
    for id, tenant in enumerate("aabb", 1):
        queue.push(arrive(id, tenant=tenant))
    queue.serve("a", 0, 10)
    queue.serve("b", 19, 0)
    assert queue.pop().request.tenant == "b"
    queue.serve("b", 2, 0)
    assert queue.pop().request.tenant == "a"


def test_a_priority_counts_more_than_a_share(queue):
    queue.push(arrive(1, tenant="modest"))
    queue.push(arrive(2, tenant="greedy", priority=1))
    queue.serve("greedy", 10**6, 0)
    assert drain(queue) == [2, 1]


def test_an_old_backlog_does_not_overtake_a_light_tenant_by_its_age(queue):
    for id in range(1, 6):
        queue.push(arrive(id, tenant="flood", at=float(id)))
    queue.serve("flood", 100, 0)
    queue.pop()
    queue.push(arrive(6, tenant="light", at=100 * AGEING_S))
    queue.serve("light", 1, 0)
    assert queue.pop().request.tenant == "flood", "it is lifted, and the older one wins the tie"
    queue.serve("flood", 100, 0)
    assert queue.pop().request.tenant == "light"


def test_idle_time_earns_nothing(queue):
    """Without the lift, whoever was idle would be served alone until it had caught up."""
    for id in range(1, 21):
        queue.push(arrive(id, tenant="busy"))
    for _ in range(10):
        queue.serve(queue.pop().request.tenant, 100, 0)
    for id in range(21, 31):
        queue.push(arrive(id, tenant="idle"))
    order = drain(queue, cost=100)
    tenants = ["idle" if id > 20 else "busy" for id in order]
    assert max(len(run) for run in "".join(t[0] for t in tenants[:18]).replace("bi", "b i").split()) <= 2


def test_idle_time_earns_nothing_when_nobody_else_waits_either(queue):
    queue.push(arrive(1, tenant="busy"))
    queue.serve(queue.pop().request.tenant, 1000, 0)
    queue.push(arrive(2, tenant="idle"))
    queue.push(arrive(3, tenant="idle"))
    queue.push(arrive(4, tenant="busy"))
    assert drain(queue, cost=10) == [2, 4, 3]


def test_a_preempted_one_goes_before_everybody_of_its_priority(queue):
    older, younger = arrive(1, tenant="a"), arrive(2, tenant="a")
    queue.push(arrive(3, tenant="a"))
    queue.push(arrive(4, tenant="b"))
    queue.push(arrive(5, tenant="b", priority=1))
    queue.serve("a", 1000, 1000)
    queue.push_front(younger)
    queue.push_front(older)
    assert queue.statistics()["waiting_preempted"] == 2
    assert drain(queue)[:3] == [5, 1, 2]


def test_the_worst_ranked_is_of_the_lowest_priority_and_the_youngest_of_those(queue):
    oldest, old, low = arrive(1, priority=1), arrive(2, priority=1), arrive(3)
    young, lowest = arrive(4), arrive(5, priority=-3)
    ranked = sorted([young, lowest, low, old, oldest], key=queue.rank)
    assert [sequence.request.id for sequence in ranked] == [1, 2, 3, 4, 5]


def test_whoever_is_removed_is_never_next(queue):
    sequences = [arrive(id, tenant="ab"[id % 2], priority=id % 3) for id in range(1, 13)]
    for sequence in sequences:
        queue.push(sequence)
    queue.push_front(resumed := arrive(13))
    for sequence in [*sequences[::2], resumed]:
        queue.remove(sequence)
        queue.check()
    assert sorted(drain(queue)) == [2, 4, 6, 8, 10, 12]


class Service:
    """Seats that serve one answer token a turn each, and who waited how many turns."""

    def __init__(self, seats):
        self.seats = seats
        self.queue = WaitingQueue(AGEING_S)
        self.running = {}
        self.turn = 0
        self.ids = 0
        self.waits = {}

    def submit(self, tenant, prompt, answer):
        self.ids += 1
        request = Request(
            id=self.ids, prompt=(1,) * prompt, max_tokens=answer, sampling=GREEDY, tenant=tenant, priority=0
        )
        self.queue.push(Sequence(request, arrival=float(self.turn), tokens=list(request.prompt)))

    def step(self):
        while self.queue and len(self.running) < self.seats:
            sequence = self.queue.pop()
            request = sequence.request
            self.queue.serve(request.tenant, len(request.prompt), 0)
            self.running[sequence] = request.max_tokens
            self.waits.setdefault(request.tenant, []).append(self.turn - int(sequence.arrival))
        for sequence in list(self.running):
            self.queue.serve(sequence.request.tenant, 0, 1)
            self.running[sequence] -= 1
            if not self.running[sequence]:
                del self.running[sequence]
        self.turn += 1


@pytest.mark.parametrize("seed", range(5))
def test_a_flooding_tenant_delays_a_light_one_by_at_most_twice_the_longest_request(seed):
    """The factor: two requests of the longest kind, however many thousand the flood has queued.

    First come, first served would make the light tenant wait for the whole backlog, over 10,000 turns.
    """
    random, service, longest = Random(seed), Service(seats=8), 40
    for _ in range(3000):
        service.submit("flood", random.randint(1, 100), random.randint(1, longest))
    for turn in range(3000):
        if turn % 20 == 0:
            service.submit("light", random.randint(1, 100), random.randint(1, longest))
        service.step()
    service.queue.check()
    assert len(service.waits["light"]) >= 148
    assert max(service.waits["light"]) <= 2 * longest


def test_backlogged_tenants_get_equal_service_whatever_the_size_of_their_requests():
    random, service = Random(1), Service(seats=8)
    for _ in range(3000):
        service.submit("short", random.randint(1, 10), random.randint(1, 5))
        service.submit("long", random.randint(1, 100), random.randint(1, 100))
    for _ in range(1000):
        service.step()
    served = service.queue._service
    assert abs(served["short"] - served["long"]) <= 2 * 8 * (100 + 2 * 100)


def test_counters_of_idle_tenants_are_bounded(queue, monkeypatch):
    monkeypatch.setattr(waiting, "MAX_TENANTS", 10)
    for id in range(1, 101):
        queue.push(arrive(id, tenant=f"t{id}"))
        queue.serve(queue.pop().request.tenant, 1, 0)
        queue.check()
    assert len(queue._service) <= 11
    for id in range(101, 151):
        queue.push(arrive(id, tenant=f"t{id}"))
        queue.check()
    assert sorted(drain(queue)) == list(range(101, 151))


def test_any_order_of_calls_keeps_the_books_and_loses_nobody():
    random = Random(7)
    for _ in range(50):
        queue, admitted = WaitingQueue(AGEING_S), 0
        inside: set[Sequence] = set()
        outside: list[Sequence] = []
        for id in range(1, 120):
            move = random.random()
            if move < 0.5:
                sequence = arrive(id, tenant=random.choice("abcd"), priority=random.choice([0, 0, 1]))
                queue.push(sequence)
                inside.add(sequence)
            elif move < 0.6 and outside:
                queue.push_front(sequence := outside.pop())
                inside.add(sequence)
            elif move < 0.7 and inside:
                queue.remove(sequence := random.choice(sorted(inside, key=queue.rank)))
                inside.remove(sequence)
            elif inside:
                inside.remove(sequence := queue.pop())
                queue.serve(sequence.request.tenant, random.randint(0, 50), random.randint(0, 50))
                outside.append(sequence)
                admitted += 1
            queue.check()
            assert set(queue) == inside
            assert len(queue) == len(inside)
        assert admitted


def test_ten_thousand_that_wait_cost_microseconds_a_call():
    """Not a benchmark: it tells O(log n) from O(n), which would take a hundred times the bound."""
    queue = WaitingQueue(AGEING_S)
    sequences = [arrive(id, tenant=f"t{id % 1000}", priority=id % 5) for id in range(10_000)]
    started = perf_counter()
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[::2]:
        queue.remove(sequence)
    while queue:
        queue.serve(queue.pop().request.tenant, 10, 10)
    assert perf_counter() - started < 5
