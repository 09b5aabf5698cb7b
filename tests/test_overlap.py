"""Whatever a batch looks like, a runner with a step in flight and captured graphs gives the tokens that transformers'
own code gives step by step. On the recording device: a GPU's order of work, and a CUDA graph's rules, without a GPU."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled.gpu.recording import Recording
from compiled.runner import LocalRunner
from compiled.step import Sampling
from streamengine.request import Request
from tests.compiled import tiny
from tests.overlap import serve, start

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=7),
    Sampling(temperature=0.8, top_p=0.9, seed=11),
    Sampling(temperature=1.1, top_k=12, seed=3),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.0, min_p=0.05, frequency_penalty=0.7, seed=5),
    Sampling(bad_words=((5, 6), (9,)), barred_token_ids=(2, 3), min_tokens=6, temperature=0.7, seed=1),
    Sampling(logit_bias=((4, 3.0), (8, -2.0)), logprobs=2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def build(folder: Path) -> Callable[..., Any]:
    return lambda **options: start(folder, **options)


@pytest.fixture(scope="module")
def truth(build: Callable[..., LocalRunner]) -> LocalRunner:
    return build(device="cpu", eager=True)


@pytest.fixture(scope="module")
def runner(build: Callable[..., LocalRunner]) -> LocalRunner:
    return build(device="recording")


def requests(**more: Any) -> list[Request]:
    """Prompts of many lengths, each with another kind of sampling."""
    source = random.Random(4)
    return [
        Request(
            id=i,
            prompt=tuple(source.randrange(3, 97) for _ in range(1 + 5 * i % 29)),
            max_tokens=9 + 7 * i % 12,
            **({"sampling": SAMPLINGS[i % len(SAMPLINGS)]} | more),
        )
        for i in range(14)
    ]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"max_num_seqs": 1},
    "in chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"pages": 26},
    "from a prefix cache": {"cached": True},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_gives_the_tokens_of_the_truth(way: dict[str, Any], runner: LocalRunner, truth: LocalRunner) -> None:
    expected, _ = serve(truth, requests())
    got, statistics = serve(runner, requests(), **way)
    assert got == expected
    assert ("pages" in way) == (statistics["preemptions"] > 0)
    assert runner.statistics()["broken_rows"] == 0, "nothing that was freed is read"


def test_forks_and_guesses_give_the_tokens_of_the_truth(runner: LocalRunner, truth: LocalRunner) -> None:
    repeating = [
        Request(id=i, prompt=(5, 6, 7, 8) * 4 + (i + 10,), max_tokens=16, sampling=sampling, speculate=3)
        for i, sampling in enumerate((Sampling(), Sampling(temperature=0.6, seed=2)))
    ]
    for batch in (requests(n=3)[:5], repeating):
        expected, _ = serve(truth, batch, cached=True)
        got, statistics = serve(runner, batch, cached=True)
        assert got == expected
    assert statistics["draft_tokens"] > 0


def test_an_abort_with_a_step_in_flight_leaves_the_others_alone(runner: LocalRunner, truth: LocalRunner) -> None:
    expected, _ = serve(truth, requests())
    got, _ = serve(runner, requests(), aborts={2: 1, 3: 4, 9: 6, 12: 9})
    for key, tokens in expected.items():
        assert got.get(key, []) == (tokens if key[0] not in (1, 4, 6, 9) else tokens[: len(got.get(key, []))])


def test_steps_ran_through_graphs_and_through_none(runner: LocalRunner) -> None:
    def capture() -> Iterator[None]:
        while runner.capture_next():  # type: ignore[attr-defined]
            yield

    serve(runner, requests())
    before = runner.statistics()
    captured = len(list(capture()))
    serve(runner, requests())
    after = runner.statistics()
    assert captured > 0
    assert after["graph_buckets"] == before["graph_buckets"] + captured
    for way in ("whole", "pieces"):
        assert after[f"graph_steps_{way}"] > before[f"graph_steps_{way}"] > 0
    assert after["graph_steps_none"] == before["graph_steps_none"], "whatever was missed is there now"
    assert after["compilations_after_ready"] == 0


def test_the_next_step_is_submitted_before_the_tokens_of_the_last_are_on_the_host(
    build: Callable[..., Any], truth: LocalRunner
) -> None:
    runner = build(device="recording", eager=True)
    device: Recording = runner.device
    waiting: list[bool] = []
    submit = runner.submit
    runner.submit = lambda step: (waiting.append(bool(device._travelling)), submit(step))[1]
    assert serve(runner, requests())[0] == serve(truth, requests())[0]
    assert sum(waiting) > len(waiting) / 2
