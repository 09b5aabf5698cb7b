"""Grammars in the scheduler's steps: every answer keeps to its own, whatever else happens to it."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from compiled.step import Sampling
from streamengine.guided.constraint import GrammarConstraint
from streamengine.guided.grammar import Constraint, Grammar
from streamengine.guided.guide import Guide
from streamengine.guided.matcher import Vocabulary, accepts
from streamengine.guided.schema import prepare
from streamengine.request import Finish
from tests.fakes import EOS, catchy, oracle
from tests.scheduling import Bench

COMPLETE = Finish("stop", "grammar")
STOPPED = Finish("stop", "stop_token")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer"},
        "tags": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WORD = Grammar(kind="regex", text="[a-f]{3,9}!")

both_depths = pytest.mark.parametrize("depth", [1, 2])


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=prepare(value))


class Guided:
    """Benches whose scheduler can make masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.guide = Guide(lambda: vocabulary)

    def bench(self, **options: Any) -> Bench:
        return Bench(mask=self.guide.mask, max_model_len=512, usable_pages=options.pop("usable_pages", 256), **options)

    def begin(self, grammar: Grammar) -> Constraint:
        return GrammarConstraint(self.guide.compile(grammar))

    def submit(self, bench: Bench, grammar: Grammar, prompt: bytes = b"hi", **given: Any) -> int:
        options: dict[str, Any] = {"max_tokens": 200, "stop_token_ids": (EOS,), **given}
        return bench.submit(prompt, constraint=self.begin(grammar), grammar=grammar, **options)

    def accepts(self, grammar: Grammar, tokens: list[int]) -> bool:
        text = bytes(token for token in tokens if token != EOS).decode()
        return accepts(self.vocabulary, self.guide.compile(grammar), text)


@pytest.fixture
def guided(vocabulary: Vocabulary) -> Iterator[Guided]:
    guided = Guided(vocabulary)
    yield guided
    guided.guide.close()


@both_depths
def test_an_answer_keeps_to_its_grammar_and_stops_when_it_is_complete(guided: Guided, depth: int) -> None:
    bench = guided.bench(depth=depth)
    id = guided.submit(bench, WORD)
    bench.run()
    assert guided.accepts(WORD, bench.answers[id])
    assert bench.finishes[id] == COMPLETE


@both_depths
def test_each_row_of_a_step_has_a_grammar_of_its_own_or_none(guided: Guided, depth: int) -> None:
    grammars = [WORD, schema(PERSON), Grammar(kind="regex", text="(ab|cd){2}"), schema({"type": "boolean"})]
    bench = guided.bench(depth=depth)
    ids = {guided.submit(bench, grammar, prompt=b"p" * i): grammar for i, grammar in enumerate(grammars, 1)}
    free = bench.submit(b"free", max_tokens=12)
    bench.run()
    assert all(guided.accepts(grammar, bench.answers[id]) for id, grammar in ids.items())
    assert bench.answers[free] == oracle(b"free", 12)


def test_a_complete_answer_stops_without_an_end_of_sequence_token(guided: Guided) -> None:
    bench = guided.bench()
    id = guided.submit(bench, schema(PERSON))
    bench.run()
    assert EOS not in bench.answers[id]
    assert set(json.loads(bytes(bench.answers[id]))) == {"name", "age", "tags"}


def test_an_answer_that_may_end_is_ended_by_the_model(guided: Guided) -> None:
    bench = guided.bench(answer=lambda context, sampling: EOS)
    id = guided.submit(bench, Grammar(kind="regex", text="(ab)+"))
    bench.run()
    assert bench.answers[id] == [*b"ab", EOS]
    assert bench.finishes[id] == STOPPED


def test_max_tokens_cuts_an_answer_where_it_is(guided: Guided) -> None:
    bench = guided.bench()
    whole, cut = guided.submit(bench, schema(PERSON)), guided.submit(bench, schema(PERSON), max_tokens=5)
    bench.run()
    assert bench.answers[cut] == bench.answers[whole][:5]
    assert bench.finishes[cut] == Finish("length", "max_tokens")


def test_the_last_token_allowed_may_complete_the_answer(guided: Guided) -> None:
    bench = guided.bench()
    id = guided.submit(bench, Grammar(kind="regex", text="abc"), max_tokens=3)
    bench.run()
    assert bench.finishes[id] == COMPLETE


@both_depths
@pytest.mark.parametrize("speculate", [0, 4])
def test_forced_tokens_save_steps_and_change_nothing(guided: Guided, depth: int, speculate: int) -> None:
    answers, steps, forced = [], [], []
    for jump in (False, True):
        bench = guided.bench(depth=depth)
        id = guided.submit(bench, schema(PERSON), jump=jump, speculate=speculate)
        bench.run()
        answers.append(bench.answers[id])
        steps.append(len(bench.runner.steps))
        forced.append(sum(delta.forced for delta in bench.deltas))
    assert answers[0] == answers[1]
    assert forced[0] == 0 < forced[1]
    assert steps[0] > steps[1] or speculate


def test_log_probabilities_are_of_sampled_tokens_so_nothing_is_forced(guided: Guided) -> None:
    bench = guided.bench()
    id = guided.submit(bench, schema(PERSON), sampling=Sampling(logprobs=0))
    bench.run()
    told = [one for delta in bench.deltas for one in delta.logprobs]
    assert [one.token for one in told] == bench.answers[id]


def test_guesses_keep_to_the_grammar_and_change_nothing(guided: Guided) -> None:
    grammar = Grammar(kind="regex", text="([a-c]{2}-)*!")
    answers = []
    for speculate in (0, 4):
        bench = guided.bench(answer=catchy)
        id = guided.submit(bench, grammar, speculate=speculate, max_tokens=120)
        bench.run()
        answers.append(bench.answers[id])
    assert answers[0] == answers[1]
    assert bench.scheduler.statistics()["accepted_tokens"] > 0


@both_depths
def test_a_preempted_answer_goes_on_in_the_middle_of_its_document(guided: Guided, depth: int) -> None:
    alone = guided.bench(depth=depth)
    expected = guided.submit(alone, schema(PERSON))
    alone.run()
    bench = guided.bench(depth=depth, usable_pages=24)
    ids = [guided.submit(bench, schema(PERSON), max_tokens=60) for _ in range(4)]
    bench.run()
    assert bench.scheduler.statistics()["preemptions"] > 0
    assert {tuple(bench.answers[id]) for id in ids} == {tuple(alone.answers[expected][:60])}


def test_each_of_n_answers_has_a_place_of_its_own(guided: Guided) -> None:
    bench = guided.bench()
    id = guided.submit(bench, WORD, n=4, sampling=Sampling(temperature=1.0, seed=3))
    bench.run()
    answers = [bench.answer(id, index) for index in range(4)]
    assert all(guided.accepts(WORD, answer) for answer in answers)
    assert len({tuple(answer) for answer in answers}) > 1


@both_depths
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3, presence_penalty=0.5)])
def test_an_answer_takes_a_step_a_token_also_where_steps_overlap(
    guided: Guided, depth: int, sampling: Sampling
) -> None:
    bench = guided.bench(depth=depth)
    id = guided.submit(bench, Grammar(kind="regex", text="[a-f]{20,30}!"), jump=False, sampling=sampling)
    bench.run()
    in_vain = depth - 1  # planned before it was known that the answer is complete
    assert len(bench.runner.steps) == len(bench.answers[id]) + in_vain > 20


@both_depths
def test_a_grammar_takes_no_step_from_its_neighbours(guided: Guided, depth: int) -> None:
    bench = guided.bench(depth=depth)
    guided.submit(bench, schema(PERSON))
    free = bench.submit(b"free", max_tokens=40)
    for _ in range(40 + depth - 1):
        bench.turn()
    assert bench.answers[free] == oracle(b"free", 40)


def test_a_step_whose_bitmask_waits_is_sampled_though_the_step_before_has_failed(guided: Guided) -> None:
    bench = guided.bench(depth=2)
    broken = guided.submit(bench, WORD)
    bench.runner.fail()
    bench.launch()
    free = bench.submit(b"free", max_tokens=5)
    bench.launch()
    bench.run()
    assert bench.finishes[broken].reason == "error"
    assert bench.answers[free] == oracle(b"free", 5)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_grammars_in_a_pool_that_is_always_short(guided: Guided, seed: int) -> None:
    """Each answer is the one that it would be alone, or its beginning where it was aborted or its step failed."""
    random = Random(seed)
    grammars = [WORD, schema(PERSON), Grammar(kind="regex", text="(ab|[c-z]){2,40}"), None]
    bench = guided.bench(depth=2, usable_pages=24, prefix=seed % 2 == 1, budget=random.choice([8, 64]))
    asked: dict[int, tuple[Grammar | None, dict[str, Any]]] = {}
    for _ in range(60):
        grammar = random.choice(grammars)
        options: dict[str, Any] = {
            "prompt": bytes(random.choices(b"abcdef", k=random.randint(1, 20))),
            "max_tokens": random.randint(1, 60),
            "sampling": Sampling(temperature=1.0, seed=random.randint(0, 9)),
            "stop_token_ids": (EOS, ord("q")),
            "jump": random.random() < 0.7,
        }
        id = bench.submit(**options) if grammar is None else guided.submit(bench, grammar, **options)
        asked[id] = grammar, options
        if random.random() < 0.2:
            bench.abort(random.choice(list(asked)))
        if bench.in_flight and random.random() < 0.1:
            bench.runner.fail(at=random.choice(["submit", "wait"]))
        for _ in range(random.randint(0, 6)):
            bench.turn()
    bench.run()
    assert bench.preemptions > 0
    for id, (grammar, options) in asked.items():
        alone = guided.bench()
        other = alone.submit(**options) if grammar is None else guided.submit(alone, grammar, **options)
        alone.run()
        whole = bench.finishes[id].reason in ("stop", "length")
        told = bench.answers[id]
        assert told == (alone.answers[other] if whole else alone.answers[other][: len(told)])
        assert not whole or bench.finishes[id] == alone.finishes[other]
