"""Answers with a grammar, on a runner with a step in flight: the tokens that come one step after the other, in as many
steps. The forward pass of a step is launched before its bitmask can be made."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled.gpu.runner import GpuRunner
from compiled.runner import LocalRunner
from compiled.step import Sampling, Step
from streamengine.guided.grammar import Grammar
from streamengine.guided.guide import Guide
from streamengine.guided.matcher import Vocabulary
from streamengine.guided.schema import prepare
from streamengine.request import Request
from tests.compiled import tiny
from tests.fakes import EOS, VOCAB_SIZE, byte_tokenizer_json
from tests.overlap import Tokens, serve, start


def schema(value: Any, *, close: bool = False) -> Grammar:
    return Grammar(kind="json_schema", text=prepare(value), close=close)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tag": {"enum": ["ab", "ac", "d"]}},
    "required": ["name", "tag"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(kind="regex", text="[a-f]{3,9}!"),
    schema(PERSON),  # much of it is forced
    None,
    Grammar(kind="regex", text="(ab|[c-z]){2,20}"),  # ends where the model says so
    schema({"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 9}, close=True),
)
SAMPLINGS = (
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.9, top_p=0.9, seed=7),
    Sampling(),
    Sampling(temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=1.0, seed=9, bad_words=((97, 98), (100,)), logprobs=1),
    Sampling(temperature=1.1, top_k=12, seed=1, logit_bias=((97, 2.0),)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), "llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def truth(folder: Path) -> LocalRunner:
    return start(folder, device="cpu", eager=True)


@pytest.fixture(scope="module")
def runner(folder: Path) -> GpuRunner:
    runner = start(folder, device="recording")
    assert isinstance(runner, GpuRunner)
    return runner


@pytest.fixture(scope="module")
def guide() -> Iterator[Guide]:
    guide = Guide(lambda: Vocabulary.of_model(byte_tokenizer_json(), VOCAB_SIZE, (EOS,)))
    yield guide
    guide.close()


def requests(**more: Any) -> list[Request]:
    """Prompts of many lengths, each with another grammar or none and another kind of sampling."""
    source = random.Random(4)
    return [
        Request(
            id=i,
            prompt=tuple(source.randrange(32, 127) for _ in range(1 + 5 * i % 29)),
            max_tokens=14 + 7 * i % 30,
            grammar=GRAMMARS[i % len(GRAMMARS)],
            stop_token_ids=(EOS,),
            **({"sampling": SAMPLINGS[i % len(SAMPLINGS)]} | more),
        )
        for i in range(14)
    ]


@pytest.fixture(scope="module")
def expected(truth: LocalRunner, guide: Guide) -> Tokens:
    return serve(truth, requests(), guide=guide)[0]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"max_num_seqs": 1},
    "in chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"pages": 20},
    "from a prefix cache": {"cached": True},
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_gives_the_tokens_of_one_step_after_the_other(
    way: dict[str, Any],
    depth: int,
    runner: GpuRunner,
    expected: Tokens,
    guide: Guide,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "depth", depth)
    got, statistics = serve(runner, requests(), guide=guide, **way)
    assert got == expected
    assert ("pages" in way) == (statistics["preemptions"] > 0)
    assert runner.statistics()["broken_rows"] == 0, "nothing that was freed is read"


def test_several_answers_and_answers_without_forced_tokens_are_the_same(
    runner: GpuRunner, truth: LocalRunner, guide: Guide, expected: Tokens
) -> None:
    forked = requests(n=3)[:5]
    assert serve(runner, forked, guide=guide)[0] == serve(truth, forked, guide=guide)[0]
    unforced = [request for request in requests(jump=False) if not (request.grammar and request.grammar.close)]
    got, _ = serve(runner, unforced, guide=guide)
    assert got == {key: expected[key] for key in got}


def test_an_abort_with_a_step_in_flight_leaves_the_others_alone(
    runner: GpuRunner, guide: Guide, expected: Tokens
) -> None:
    gone = {2: 1, 3: 4, 5: 0, 6: 5, 9: 6, 12: 9}
    got, _ = serve(runner, requests(), guide=guide, aborts=gone)
    for (id, index), tokens in expected.items():
        told = got.get((id, index), [])
        assert told == (tokens[: len(told)] if id in gone.values() else tokens)


def test_a_forward_pass_is_launched_before_the_tokens_that_its_bitmask_hangs_on_are_there(
    runner: GpuRunner, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[bool] = []
    submit = runner.submit

    def look(step: Step) -> Any:
        handle = submit(step)
        assert handle.arrival is None, "no step with a bitmask is sampled at once"
        late.append(step.masks._made is None)  # type: ignore[union-attr]
        return handle

    monkeypatch.setattr(runner, "submit", look)
    answers, _ = serve(runner, [request for request in requests(jump=False) if request.id % 5 in (0, 3)], guide=guide)
    assert sum(late) > len(late) / 2
    assert len(late) <= max(map(len, answers.values())) + 2
