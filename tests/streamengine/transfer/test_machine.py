"""Random requests, aborts, faults, lost and repeated messages, reads that hang and peers that restart: after each move
the books of all engines must balance, and in the end every request has ended with the tokens that it must have."""

from collections import Counter
from random import Random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled.step import Sampling
from streamengine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from tests.fakes import beam_oracle
from tests.remote import DEADLINE_S, LEASE_S, Engine, Wire

SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(logprobs=2), Sampling(presence_penalty=1.0)]
KINDS = [{}, {}, {"n": 2}, {"n": 3}, {"beam_width": 2}, {"prompt_logprobs": 1}, {"speculate": 3}]
SKEW_S = 1000.0


class SplitMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(8, 24),
        page_size=st.integers(1, 5),
        depth=st.integers(1, 2),
        budget=st.integers(8, 30),
        prefix=st.booleans(),
        window=st.none() | st.integers(3, 12),
        threshold=st.integers(1, 6),
        on_failure=st.sampled_from(["recompute", "recompute", "fail"]),
        peers=st.integers(1, 2),
        mutual=st.booleans(),
    )
    def build(self, pages, page_size, depth, budget, prefix, window, threshold, on_failure, peers, mutual):
        """``mutual``: the first peer has its own long prompts computed in return."""
        self.options = {
            "usable_pages": pages,
            "page_size": page_size,
            "depth": depth,
            "budget": budget,
            "prefix": prefix,
            "window": window,
            "max_num_seqs": 4,
            "max_queue": 6,
            "max_model_len": 40,
            "reserve": pages // 2,
            "threshold": threshold,
            "on_failure": on_failure,
        }
        self.mutual = mutual
        self.decode = Engine("d", decode=True, prefill=mutual, **self.options)
        self.incarnations = peers
        self.wires = []
        for number in range(peers):
            prefill = Engine(f"p{number}", prefill=True, decode=self.returns(number), now=SKEW_S, **self.options)
            self.wires.append(Wire(self.decode, prefill, f"p{number}"))
        if mutual:
            self.wires.append(Wire(self.wires[0].prefill, self.decode, "d"))
        for wire in self.wires:
            wire.connect()
        for engine in self.engines:
            engine.exchange()
        self.zombies = 0

    def returns(self, number):
        return self.mutual and number == 0

    @property
    def engines(self):
        return [self.decode, *(wire.prefill for wire in self.wires if wire.prefill is not self.decode)]

    def reads(self):
        return [(engine, transfer) for engine in self.engines for transfer in engine.worker.reads]

    @rule(
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 20),
        sampling=st.sampled_from(SAMPLINGS),
        stops=st.sets(st.integers(97, 122), max_size=3),
        kind=st.sampled_from(KINDS),
        text=st.integers(0, 2),
        at=st.integers(0, 9),
    )
    def submit(self, length, max_tokens, sampling, stops, kind, text, at):
        """Mostly where answers are given; now and then a peer has a client of its own."""
        engine = self.engines[at % len(self.engines)] if at > 6 else self.decode
        prompt = bytes((text * i) % 7 for i in range(length)) if text else length
        try:
            engine.submit(prompt, max_tokens, sampling, tuple(stops), **kind)
        except (ContextLengthExceeded, InvalidRequest, Overloaded):
            del engine.requests[len(engine.requests)]

    @rule(rounds=st.integers(1, 4), reads=st.integers(0, 2))
    def go_on(self, rounds, reads):
        """As it mostly is: messages arrive, and so do pages."""
        for _ in range(rounds):
            for wire in self.wires:
                if wire.up:
                    wire.deliver()
            for engine in self.engines:
                engine.turn()
                engine.now += 0.1
            for engine, transfer in self.reads()[:reads]:
                engine.end_read(transfer)

    @rule(which=st.integers(0, 2), turns=st.integers(1, 4))
    def turn(self, which, turns):
        engine = self.engines[which % len(self.engines)]
        for _ in range(turns):
            engine.turn()

    @rule(which=st.integers(0, 2))
    def launch_or_exchange(self, which):
        """Left in the middle, with as many steps in flight as there may be."""
        engine = self.engines[which % len(self.engines)]
        engine.exchange()
        if len(engine.in_flight) < engine.runner.depth:
            engine.launch()

    @rule(which=st.integers(0, 2), most=st.integers(1, 5))
    def deliver(self, which, most):
        self.wires[which % len(self.wires)].deliver(most)

    @rule(which=st.integers(0, 2), pick=st.integers(0, 1000))
    def repeat(self, which, pick):
        self.wires[which % len(self.wires)].repeat(pick)

    @precondition(lambda self: self.reads())
    @rule(pick=st.integers(0, 100), well=st.integers(0, 4))
    def end_read(self, pick, well):
        engine, transfer = self.reads()[pick % len(self.reads())]
        engine.end_read(transfer, well=well > 0)

    @precondition(lambda self: self.reads())
    @rule(pick=st.integers(0, 100))
    def write_late(self, pick):
        engine, transfer = self.reads()[pick % len(self.reads())]
        engine.scribble(transfer)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0, LEASE_S, DEADLINE_S]), luck=st.integers(0, 2))
    def pass_time(self, seconds, luck):
        for engine in self.engines if luck or seconds < LEASE_S else ():
            engine.now += seconds

    @rule(which=st.integers(0, 2), luck=st.integers(0, 5))
    def cut_or_connect(self, which, luck):
        wire = self.wires[which % len(self.wires)]
        if not wire.up:
            wire.connect()
        elif luck == 0:
            wire.cut()

    @rule(which=st.integers(0, 1), luck=st.integers(0, 8))
    def restart_a_peer(self, which, luck):
        """Its memory can be read until nobody does any more, as a memfd can; what it was computing is gone."""
        if luck:
            return
        which %= len(self.wires) - self.mutual
        wire = self.wires[which]
        back = self.wires[-1] if self.returns(which) else wire
        for one in (wire, back):
            if one.up:
                one.cut()
        self.incarnations += 1
        old = wire.prefill
        wire.prefill = Engine(
            old.card.engine, self.incarnations, prefill=True, decode=self.returns(which), now=old.now, **self.options
        )
        if back is not wire:
            back.decode = wire.prefill

    @precondition(lambda self: self.decode.requests)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick):
        ids = list(self.decode.requests)
        self.decode.abort(ids[pick % len(ids)])

    @rule(which=st.integers(0, 2), luck=st.integers(0, 5))
    def break_the_runner(self, which, luck):
        engine = self.engines[which % len(self.engines)]
        if luck == 0 and not engine.runner.faulty:
            engine.runner.fail()

    @invariant()
    def books_balance(self):
        if hasattr(self, "decode"):
            for engine in self.engines:
                engine.check()
            self.zombies += self.decode.connector.statistics()["remote_zombies"] > 0

    def teardown(self):
        if not hasattr(self, "decode"):
            return
        self.run_to_the_end()
        for engine, transfer in self.reads():
            engine.end_read(transfer)
        for _ in range(3):
            for engine in self.engines:
                engine.now += LEASE_S
                engine.turn()
                engine.turn()
        for engine in self.engines:
            assert engine.pool.available == engine.pool.capacity, f"{engine.card.engine} lost pages"
            for id, request in engine.requests.items():
                self.check_answers(engine, id, request)

    def run_to_the_end(self):
        for _ in range(400):
            for wire in self.wires:
                if wire.up:
                    wire.deliver()
            for engine in self.engines:
                engine.turn()
            if not any(e.scheduler.has_work or e.in_flight or len(e.connector) for e in self.engines):
                return
            for engine, transfer in self.reads()[:2]:
                engine.end_read(transfer)
            for engine in self.engines:
                engine.now += 0.2
        raise AssertionError("a request that never ends")

    def check_answers(self, engine, id, request):
        if request.beam_width:
            expected = beam_oracle(
                request.prompt,
                request.max_tokens,
                request.beam_width,
                n=request.n,
                stop_token_ids=request.stop_token_ids,
                window=engine.runner.kv.window,
            )
            for index, (answer, _) in enumerate(expected):
                if engine.ends[id, index].reason in ("stop", "length"):
                    assert engine.answer(id, index) == answer
            return
        for index in range(request.n):
            finish, answer = engine.ends[id, index], engine.answer(id, index)
            if finish.reason in ("stop", "length"):
                assert answer == engine.expected(id, index)
            else:
                assert answer == engine.expected(id, index)[: len(answer)]


def test_a_storm_of_requests_and_of_everything_that_can_go_wrong():
    """The same moves as the machine's, but dense, and seen to have come to everything."""
    seen: Counter[str] = Counter()
    for scenario in range(100):
        random = Random(scenario)
        machine = SplitMachine()
        machine.build(
            random.randint(8, 24), random.randint(1, 5), random.randint(1, 2), random.randint(8, 30),
            random.random() < 0.7, random.choice([None, None, 6]), random.randint(1, 6),
            random.choice(["recompute", "recompute", "fail"]), random.randint(1, 2),
            random.random() < 0.3,
        )  # fmt: skip
        for _ in range(80):
            move = random.random()
            if move < 0.35:
                stops = set(random.sample(range(97, 123), random.randint(0, 1)))
                sampling, kind = random.choice(SAMPLINGS), random.choice(KINDS)
                text, at = random.randint(0, 2), random.randint(0, 9)
                machine.submit(random.randint(4, 20), random.randint(1, 20), sampling, stops, kind, text, at)
            elif move < 0.80:
                machine.go_on(random.randint(1, 3), random.randint(0, 2))
            elif move < 0.84:
                machine.abort(random.randint(0, 1000)) if machine.decode.requests else None
            elif move < 0.88:
                machine.repeat(0, random.randint(0, 1000))
            elif move < 0.92 and machine.reads():
                machine.write_late(0)
                machine.end_read(random.randint(0, 10), random.randint(0, 1))
            elif move < 0.96:
                machine.pass_time(random.choice([1.0, 2.0, LEASE_S, DEADLINE_S]), 1)
            else:
                machine.cut_or_connect(random.randint(0, 1), random.randint(0, 1))
                machine.restart_a_peer(random.randint(0, 1), random.randint(0, 3))
                machine.break_the_runner(random.randint(0, 2), random.randint(0, 2))
            machine.books_balance()
        machine.teardown()
        seen += Counter({name: int(value) for name, value in machine.decode.connector.statistics().items()})
        seen["zombies"] += machine.zombies
        seen["preemptions"] += int(machine.decode.preemptions)
    counts = {name: seen[f"remote_{name}"] for name in ("landed", "cancelled")}
    causes = ("deadline", "lost", "failed", "lease", "refused", "no_peer")
    counts |= {name: seen[f"remote_fallbacks_{name}"] for name in causes}
    counts |= {name: seen[name] for name in ("zombies", "preemptions")}
    assert counts["landed"] > 100 and min(counts.values()) > 0, counts


PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
TestSplitMachine = SplitMachine.TestCase
TestSplitMachine.settings = settings(max_examples=60, stateful_step_count=50, phases=PHASES, deadline=None)


class LongRun(SplitMachine):
    pass


TestSplitMachineThousandsOfTimes = pytest.mark.slow(pytest.mark.timeout(1200)(LongRun.TestCase))
TestSplitMachineThousandsOfTimes.settings = settings(
    max_examples=2000, stateful_step_count=60, phases=PHASES, deadline=None
)
