"""Random arrivals, aborts, faults and pool sizes; after each move the scheduler's books must balance."""

from random import Random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled.step import Sampling
from streamengine.errors import ContextLengthExceeded, Overloaded
from tests.scheduling import Bench

MAX_MODEL_LEN = 40


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        usable_pages=st.integers(2, 12),
        page_size=st.integers(1, 5),
        depth=st.integers(1, 2),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 20),
        max_queue=st.integers(1, 6),
    )
    def build(self, usable_pages, page_size, depth, max_num_seqs, spare_budget, max_queue):
        self.limit = max_num_seqs + max_queue
        self.admitted: dict[int, int] = {}
        self.running: list[int] = []
        self.bench = Bench(
            usable_pages=usable_pages,
            page_size=page_size,
            depth=depth,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + spare_budget,
            max_model_len=MAX_MODEL_LEN,
            max_queue=max_queue,
        )

    @rule(
        lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25)), min_size=1, max_size=4),
        seed=st.none() | st.integers(0, 3),
        stops=st.sets(st.sampled_from(b"abcdefghijklmnopqrstuvwxyz"), max_size=1),
    )
    def submit(self, lengths, seed, stops):
        bench = self.bench
        sampling = Sampling() if seed is None else Sampling(temperature=1.0, seed=seed)
        slots = bench.pool.capacity * bench.pool.page_size
        for prompt, max_tokens in lengths:
            never = prompt + max_tokens > MAX_MODEL_LEN or prompt + max_tokens - 1 > slots
            full = len(bench.scheduler.unfinished) >= self.limit
            if never or full:
                with pytest.raises(ContextLengthExceeded if never else Overloaded):
                    bench.submit(prompt, max_tokens)
            else:
                bench.submit(prompt, max_tokens, sampling, tuple(stops))

    @precondition(lambda self: len(self.bench.in_flight) < self.bench.runner.depth)
    @rule()
    def launch(self):
        bench = self.bench
        oldest = next(iter(bench.scheduler.unfinished), None)
        waiting, preemptions = bench.waiting, bench.preemptions
        step = bench.launch()
        if bench.preemptions > preemptions:
            assert bench.waiting[-len(waiting) :] == waiting or not waiting, "admitted in a step that preempts"
        if step is None:
            assert bench.in_flight or oldest is None, "nothing in flight, and still nobody runs"
        else:
            rows = {row.request for step in [step, *(step for step, _ in bench.in_flight)] for row in step.rows}
            assert oldest in rows, "the oldest was passed over"
            self.note_admissions(oldest)

    def note_admissions(self, oldest):
        """A preempted sequence was neither the oldest nor resumed less than a page ago."""
        bench, number = self.bench, len(self.bench.runner.steps)
        now = bench.running
        for id in self.running:
            if id not in now and id not in bench.finishes:
                assert id != oldest
                assert number - self.admitted[id] > bench.pool.page_size
        self.admitted |= {id: number for id in now if id not in self.running}
        self.running = now

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def land(self):
        self.bench.land()

    @precondition(lambda self: self.bench.requests)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick):
        id = pick % len(self.bench.requests) + 1
        ended = id in self.bench.finishes or id not in self.bench.answers
        assert (self.bench.abort(id) is None) == ended

    @precondition(lambda self: self.bench.in_flight and not self.bench.runner.faulty)
    @rule(luck=st.integers(0, 3), at=st.sampled_from(["submit", "wait"]))
    def break_the_runner(self, luck, at):
        if luck == 0:
            self.bench.runner.fail(at=at)

    @rule(turns=st.integers(1, 10))
    def turns(self, turns):
        """As the core does it, but left in the middle: with as many steps in flight as there may be."""
        bench = self.bench
        for _ in range(turns):
            if len(bench.in_flight) == bench.runner.depth:
                bench.land()
            self.launch()
            bench.scheduler.check()

    @invariant()
    def books_balance(self):
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        # Each step computes a token of the oldest, whose tokens are computed at most once more from here.
        bench.run(turns=2 * MAX_MODEL_LEN * (len(bench.scheduler.unfinished) + 1))
        for id, answer in bench.answers.items():
            finish, expected = bench.finishes[id], bench.expected(id)
            if finish.reason in ("stop", "length"):
                assert answer == expected
                assert (finish.reason == "stop") == (answer[-1] in bench.requests[id].stop_token_ids)
            else:
                assert answer == expected[: len(answer)]


# Shrinking is worth its time, explaining takes ten times as long.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40, phases=PHASES)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_requests_and_aborts_in_a_pool_that_is_always_short(seed):
    """The same moves as the machine's, but dense: hardly a plan without a shortage."""
    preemptions = 0.0
    for scenario in range(10):
        random = Random(100 * seed + scenario)
        machine = SchedulerMachine()
        pages, size = random.randint(3, 12), random.randint(1, 5)
        machine.build(pages, size, random.randint(1, 2), random.randint(2, 6), random.randint(0, 20), 6)
        fits = min(MAX_MODEL_LEN, pages * size)
        for _ in range(60):
            prompt = random.randint(1, max(1, fits // 8))
            stops = set(random.sample(range(97, 123), random.randint(0, 1)))
            machine.submit([(prompt, random.randint(1, fits - prompt))], random.choice([None, 1]), stops)
            if random.random() < 0.1:
                machine.abort(random.randint(0, 1000))
            if random.random() < 0.03:
                machine.break_the_runner(0, random.choice(["submit", "wait"]))
            machine.turns(random.randint(1, 6))
            machine.books_balance()
        machine.teardown()
        preemptions += machine.bench.preemptions
    assert preemptions > 10
