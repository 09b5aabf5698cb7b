"""Random requests of every kind, aborts, faults and pool sizes; after each move the scheduler's books must balance."""

from random import Random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled.step import Sampling
from streamengine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from streamengine.request import Request
from tests.fakes import beam_oracle, catchy, formula, logprob, seen
from tests.scheduling import Bench

MAX_MODEL_LEN = 40
LETTERS = bytes(range(97, 123))

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(logprobs=2),
    Sampling(temperature=1.0, seed=2**63 - 2, presence_penalty=1.0),
]
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"n": 3, "speculate": 2},
    {"speculate": 3},
    {"speculate": 8},
    {"prompt_logprobs": 1},
    {"n": 2, "prompt_logprobs": 0},
    {"beam_width": 2},
    {"beam_width": 3, "n": 2, "length_penalty": 0.5},
    {"beam_width": 2, "n": 2, "length_penalty": -1.0, "prompt_logprobs": 2},
]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        usable_pages=st.integers(2, 16),
        page_size=st.integers(1, 5),
        depth=st.integers(1, 2),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 20),
        max_queue=st.integers(1, 6),
        prefix=st.booleans(),
        quota=st.sampled_from([0.2, 1.0]),
        window=st.none() | st.integers(1, 12),
        threshold=st.none() | st.integers(1, 8),
        plain=st.booleans(),
    )
    def build(
        self,
        usable_pages,
        page_size,
        depth,
        max_num_seqs,
        spare_budget,
        max_queue,
        prefix=False,
        quota=0.5,
        window=None,
        threshold=None,
        plain=True,
    ):
        """``plain``: one tenant, one priority, one token a step; then the guarantees are the strictest."""
        self.plain = plain
        self.limit = max_num_seqs + max_queue
        self.max_num_seqs = max_num_seqs
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
            prefix=prefix,
            quota=quota,
            window=window,
            answer=formula if plain else catchy,
            long_prefill_token_threshold=threshold,
            ageing_s=3.0,
        )

    @rule(
        lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25)), min_size=1, max_size=4),
        sampling=st.sampled_from(SAMPLINGS),
        stops=st.sets(st.sampled_from(LETTERS), max_size=2),
        kind=st.sampled_from(KINDS),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 2),
        text=st.integers(0, 3),
    )
    def submit(self, lengths, sampling, stops, kind=None, tenant="a", priority=0, text=0):
        kind = dict(kind or {})
        if self.plain:
            kind.pop("speculate", None)
            kind = {} if "beam_width" in kind else kind
        else:
            kind |= {"tenant": tenant, "priority": priority}
        for length, max_tokens in lengths:
            prompt = (b"abcabcdefgh" * 2)[:length] if text == 1 else bytes((text * i) % 7 for i in range(length))
            self.submit_one(prompt if text else length, max_tokens, sampling, tuple(stops), kind)

    def submit_one(self, prompt, max_tokens, sampling, stops, kind):
        bench, size = self.bench, self.bench.pool.page_size
        length = prompt if isinstance(prompt, int) else len(prompt)
        answers = max(kind.get("n", 1), kind.get("beam_width", 0))
        shared = (length - 1) // size
        pages = shared + answers * (bench.pool.pages_for(length + max_tokens - 1) - shared)
        refused: type[Exception] | None = None
        if answers > self.max_num_seqs:
            refused = InvalidRequest
        elif length + max_tokens > MAX_MODEL_LEN or pages > bench.pool.capacity:
            refused = ContextLengthExceeded
        elif len(bench.scheduler.unfinished) >= self.limit:
            refused = Overloaded
        if refused is None:
            bench.submit(prompt, max_tokens, sampling, stops, **kind)
        else:
            with pytest.raises(refused):
                bench.submit(prompt, max_tokens, sampling, stops, **kind)

    @precondition(lambda self: len(self.bench.in_flight) < self.bench.runner.depth)
    @rule()
    def launch(self):
        bench = self.bench
        oldest = next(iter(bench.scheduler.unfinished), None)
        waiting, preemptions = bench.waiting, bench.preemptions
        step = bench.launch()
        if self.plain and bench.preemptions > preemptions:
            assert bench.waiting[-len(waiting) :] == waiting or not waiting, "admitted in a step that preempts"
        if step is None:
            assert bench.in_flight or oldest is None, "nothing in flight, and still nobody runs"
            return
        rows = {row.request for step in [step, *(step for step, _ in bench.in_flight)] for row in step.rows}
        raised = not bench.in_flight or bench.in_flight[-1][0] is not step
        assert raised or bench.running[0] in rows, "the first in rank was passed over"
        if self.plain:
            assert oldest in rows, "the oldest was passed over"
            self.note_admissions(oldest)

    def note_admissions(self, oldest):
        """A preempted sequence was neither the oldest nor resumed less than a page ago."""
        bench, number = self.bench, len(self.bench.runner.steps)
        now = bench.running
        for id in self.running:
            if id not in now and bench.requests[id].n == 1 and id not in bench.finishes:
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
        ended = id not in self.bench.scheduler.unfinished
        assert (self.bench.abort(id) == []) == ended

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
        # Each step computes a token of the first in rank, whose tokens are computed at most once more from here.
        left = sum(max(r.n, r.beam_width) for r in bench.requests.values() if r.id in bench.scheduler.unfinished)
        bench.run(turns=2 * MAX_MODEL_LEN * (left + 1))
        for id, request in bench.requests.items():
            if id not in bench.answers:
                continue  # refused
            if request.beam_width:
                self.check_beams(request)
            else:
                self.check_answers(request)
            self.check_logprobs(request)

    def check_answers(self, request: Request):
        bench = self.bench
        for index in range(request.n):
            finish, answer = bench.ends[request.id, index], bench.answer(request.id, index)
            expected = bench.expected(request.id, index)
            if finish.reason in ("stop", "length"):
                assert answer == expected
                assert (finish.reason == "stop") == (answer[-1] in request.stop_token_ids)
            else:
                assert answer == expected[: len(answer)]

    def check_beams(self, request: Request):
        bench = self.bench
        expected = beam_oracle(
            request.prompt,
            request.max_tokens,
            request.beam_width,
            n=request.n,
            length_penalty=request.length_penalty,
            stop_token_ids=request.stop_token_ids,
            answer=bench.runner.answer,
            window=bench.runner.kv.window,
        )
        for index, (answer, score) in enumerate(expected):
            told = [d for d in bench.deltas if d.request == request.id and d.index == index and d.finish is not None]
            assert len(told) == 1 and told[0].finish is not None
            if told[0].finish.reason in ("stop", "length"):
                assert (list(told[0].tokens), told[0].beam_score) == (answer, score)

    def check_logprobs(self, request: Request):
        """Every token has its log-probability, and every prompt token once."""
        bench, window, answer = self.bench, self.bench.runner.kv.window, self.bench.runner.answer
        deltas = [delta for delta in bench.deltas if delta.request == request.id]
        scores = [score for delta in deltas for score in delta.prompt_logprobs]
        if request.prompt_logprobs is None:
            assert not scores
        else:
            places = range(1, len(scores) + 1)
            heads = [seen(request.prompt[:place], window) for place in places]
            told = zip(heads, request.prompt[1:], strict=False)
            assert scores == [logprob(head, token, request.prompt_logprobs, answer) for head, token in told]
            assert len(scores) == len(request.prompt) - 1 or bench.ends[request.id, 0].reason in ("cancelled", "error")
        most = None if request.beam_width else request.sampling.logprobs
        for delta in deltas:
            assert len(delta.logprobs) == (0 if most is None else len(delta.tokens))
        for index in range(request.n):
            context = list(request.prompt)
            for one in (one for delta in deltas if delta.index == index for one in delta.logprobs):
                assert one == logprob(seen(context, window), one.token, most or 0, answer)
                context.append(one.token)


# Shrinking is worth its time, explaining takes ten times as long.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40, phases=PHASES)


class LongRun(SchedulerMachine):
    pass


TestSchedulerMachineThousandsOfTimes = pytest.mark.slow(pytest.mark.timeout(1200)(LongRun.TestCase))
TestSchedulerMachineThousandsOfTimes.settings = settings(max_examples=3000, stateful_step_count=40, phases=PHASES)


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
            machine.submit([(prompt, random.randint(1, fits - prompt))], random.choice(SAMPLINGS), stops)
            if random.random() < 0.1:
                machine.abort(random.randint(0, 1000))
            if random.random() < 0.03:
                machine.break_the_runner(0, random.choice(["submit", "wait"]))
            machine.turns(random.randint(1, 6))
            machine.books_balance()
        machine.teardown()
        preemptions += machine.bench.preemptions
    assert preemptions > 10


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_every_kind_of_request_in_a_pool_that_is_always_short(seed):
    preemptions = drafts = hits = 0.0
    for scenario in range(10):
        random = Random(1000 * seed + scenario)
        machine = SchedulerMachine()
        pages, size = random.randint(3, 24), random.randint(1, 5)
        machine.build(
            pages,
            size,
            random.randint(1, 2),
            random.randint(3, 8),
            random.randint(0, 20),
            8,
            prefix=random.random() < 0.7,
            quota=random.choice([0.2, 1.0]),
            window=random.choice([None, None, 3, 8]),
            threshold=random.choice([None, 3]),
            plain=False,
        )
        fits = min(MAX_MODEL_LEN, pages * size)
        for _ in range(60):
            prompt = random.randint(1, max(1, fits // 4))
            machine.submit(
                [(prompt, random.randint(1, fits - prompt))],
                random.choice(SAMPLINGS),
                set(random.sample(LETTERS, random.randint(0, 1))),
                random.choice(KINDS),
                random.choice("ab"),
                random.randint(0, 2),
                random.randint(0, 3),
            )
            if random.random() < 0.1:
                machine.abort(random.randint(0, 1000))
            if random.random() < 0.03:
                machine.break_the_runner(0, random.choice(["submit", "wait"]))
            machine.turns(random.randint(1, 6))
            machine.books_balance()
        machine.teardown()
        statistics = machine.bench.scheduler.statistics()
        preemptions += statistics["preemptions"]
        drafts += statistics["accepted_tokens"]
        hits += statistics.get("prefix_hits", 0)
    assert preemptions > 10 and drafts > 10 and hits > 10
