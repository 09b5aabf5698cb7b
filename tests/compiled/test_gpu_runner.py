"""What is particular to a runner with a step in flight, on the recording device; `tests.test_overlap` serves whole
batches with it."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compiled import choices
from compiled.gpu.recording import Recording
from compiled.gpu.runner import GpuRunner
from compiled.gpu.staging import Inputs, Outputs, Parcel
from compiled.kv_store import SHARE_OF_FREE_MEMORY
from compiled.runner import RunnerOptions, build_runner
from compiled.step import LoadError, Row, Sampling, Step
from tests.compiled import tiny

FIXED: dict[str, Any] = {
    "device": "recording", "dtype": "float32", "page_size": 4, "kv_pages": 40, "eager": True, "max_num_seqs": 8
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., Any]:
    return lambda **options: build_runner(RunnerOptions(model=str(folder), **(FIXED | options)), lambda *_: None)


@pytest.fixture
def runner(start: Callable[..., Any]) -> GpuRunner:
    built: GpuRunner = start()
    return built


def test_rows_come_back_in_the_order_of_the_step_though_decoding_ones_are_computed_first(
    runner: GpuRunner, start: Callable[..., Any]
) -> None:
    rows = (
        Row(0, (3, 5, 7), 0, (1,), Sampling(logprobs=1), targets=(5, 7), targets_top=2),
        Row(1, (9,), 0, (2,), Sampling()),
        Row(2, (4, 6), 0, (3,)),
        Row(3, (8,), 0, (4,), Sampling(temperature=1.0, seed=2, logprobs=0), targets=(6,)),
    )
    result = runner.submit(Step(7, rows)).wait()
    expected = start(device="cpu").submit(Step(7, rows)).wait()
    assert (result.number, result.tokens) == (7, expected.tokens)
    assert [[one.token for one in row] for row in result.logprobs] == [
        [one.token for one in row] for row in expected.logprobs
    ]
    assert [[one.top[0][0] for one in row if one.top] for row in result.scores] == [
        [one.top[0][0] for one in row if one.top] for row in expected.scores
    ]


def test_a_token_in_flight_is_only_waited_for_where_the_step_before_samples_it(runner: GpuRunner) -> None:
    first = runner.submit(Step(1, (Row(0, (3, 5), 0, (1,), Sampling()), Row(2, (3, 5), 0, (2,)))))
    for lonely in (Row(1, (0,), 2, (1,), Sampling(), pending=True), Row(2, (0,), 2, (2,), Sampling(), pending=True)):
        with pytest.raises(ValueError, match=f"request {lonely.request}, answer 0: the step before samples no token"):
            runner.submit(Step(2, (lonely,)))
    guessing = Row(0, (0, 9), 2, (1,), Sampling(), drafts=1)
    second = runner.submit(Step(3, (Row(0, (0,), 2, (1,), Sampling(), pending=True),)))
    (token,), (following,) = first.wait().tokens[0], second.wait().tokens[0]
    again = runner.submit(Step(4, (Row(0, (3, 5, token), 0, (3,), Sampling()),))).wait()
    assert again.tokens[0] == (following,)
    runner.submit(Step(5, (guessing,))).wait()
    with pytest.raises(ValueError, match="the step before samples no token"):
        runner.submit(Step(6, (Row(0, (0,), 4, (1,), Sampling(), pending=True),)))


@dataclass
class Grammar:
    """Leaves the ids of ``allowed`` to one row; ``waited`` is called when its bits are asked for."""

    allowed: tuple[int, ...]
    waited: Callable[[], object]
    words: int = 4

    def wait(self) -> memoryview:
        self.waited()
        bits = np.zeros(32 * self.words, np.uint8)
        bits[list(self.allowed)] = 1
        return memoryview(bytearray(np.packbits(bits, bitorder="little").tobytes()))


def test_a_grammar_is_waited_for_when_the_forward_pass_is_launched_and_not_before(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    run = runner.passes.run
    monkeypatch.setattr(runner.passes, "run", lambda *given: (happened.append("launched"), run(*given))[1])
    row = Row(0, (3, 5), 0, (1,), Sampling(), mask=0)
    free = Row(1, (3, 5), 0, (2,), Sampling())
    step = Step(1, (free, row), masks=Grammar((40,), lambda: happened.append("waited")))
    alone = runner.submit(Step(0, (free,))).wait().tokens[0]
    happened.clear()
    assert runner.submit(step).wait().tokens == (alone, (40,))
    assert happened == ["launched", "waited"]


def test_a_step_with_a_bitmask_is_sampled_when_the_next_is_submitted_or_its_own_tokens_are_waited_for(
    runner: GpuRunner,
) -> None:
    waited: list[int] = []
    rows = [Row(i, (3, 5), 0, (1 + i,), Sampling(), mask=0) for i in range(3)]
    steps = [Step(i, (row,), masks=Grammar((40 + i,), partial(waited.append, i))) for i, row in enumerate(rows)]
    first = runner.submit(steps[0])
    assert waited == []
    second = runner.submit(steps[1])
    assert waited == [0]
    assert first.wait().tokens == ((40,),) and waited == [0]
    assert second.wait().tokens == ((41,),) and waited == [0, 1]


def test_a_bitmask_that_fails_fails_its_own_step_alone(runner: GpuRunner) -> None:
    def fail() -> None:
        raise RuntimeError("no bits")

    guided = Row(0, (3, 5), 0, (1,), Sampling(), mask=0)
    free = Row(1, (3, 5), 0, (2,), Sampling())
    alone = runner.submit(Step(0, (free,))).wait().tokens
    first = runner.submit(Step(1, (guided,), masks=Grammar((4,), fail)))
    second = runner.submit(Step(2, (free, Row(0, (0,), 2, (1,), Sampling(), pending=True))))
    with pytest.raises(RuntimeError, match="no bits"):
        first.wait()
    assert second.wait().tokens[:1] == alone


def test_waiting_is_not_the_hosts_work(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.perf_counter() + 100]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def pass_seconds(seconds: float) -> None:
        now[0] += seconds

    before = runner.statistics()["host_seconds"]
    run = runner.passes.run
    monkeypatch.setattr(runner.passes, "run", lambda *given: (pass_seconds(0.25), run(*given))[1])
    step = Step(1, (Row(0, (3, 5), 0, (1,), Sampling(), mask=0),), masks=Grammar((4,), lambda: pass_seconds(5)))
    first = runner.submit(step)
    second = runner.submit(Step(2, (Row(1, (3,), 0, (2,), Sampling()),)))
    pass_seconds(3)
    assert first.wait().seconds == pytest.approx(8.5)
    pass_seconds(1)
    assert second.wait().seconds == pytest.approx(1), "the device had the first step to do until then"
    assert runner.statistics()["host_seconds"] - before == pytest.approx(0.5)


def test_a_step_that_raises_leaves_those_around_it_alone(runner: GpuRunner) -> None:
    first = runner.submit(Step(1, (Row(0, (3, 5), 0, (1,), Sampling()),)))
    with pytest.raises(ValueError, match="kv_indices"):
        runner.submit(Step(2, (Row(9, (3, 5), 0, (4000,), Sampling()),)))
    second = runner.submit(Step(3, (Row(0, (0,), 2, (1,), Sampling(), pending=True),)))
    tokens = [handle.wait().tokens[0][0] for handle in (first, second)]
    assert tokens[1:] == list(
        runner.submit(Step(4, (Row(0, (3, 5, tokens[0]), 0, (2,), Sampling()),))).wait().tokens[0]
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"device": "cuda"},
            r"device cuda: torch \S+ was built without CUDA|device cuda: torch \S+ sees no CUDA device",
        ),
        ({"attention": "flashinfer"}, "attention flashinfer runs on device cuda, not on recording"),
        ({"device": "cpu", "attention": "flashinfer"}, "attention flashinfer runs on device cuda, not on cpu"),
        ({"attention": "cpu", "kv_dtype": "fp8_e4m3"}, "kv_dtype fp8_e4m3: attention cpu has no such KV cache"),
        ({"kv_pages": 2**40}, r"a KV pool of \d+ pages needs \d+ bytes"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(
    options: dict[str, Any], complaint: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match=complaint):
        start(**options)


@pytest.mark.parametrize(("cuda", "flashinfer"), [(True, True), (True, False), (False, True)])
def test_auto_is_a_gpu_where_there_is_one_and_flashinfer(
    cuda: bool, flashinfer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if flashinfer else None)
    assert choices.pick_device("auto") == ("cuda" if cuda and flashinfer else "cpu")
    assert choices.pick_dtype("auto", "cuda") == torch.bfloat16
    if cuda and not flashinfer:
        with pytest.raises(LoadError, match="attention auto on device cuda: FlashInfer is not installed"):
            choices.pick_attention("auto", Path(), "cuda")
        assert choices.pick_attention("reference", Path(), "cuda") == ("reference", "")
        with pytest.raises(LoadError, match="attention cpu runs on the CPU"):
            choices.pick_attention("cpu", Path(), "cuda")


def test_a_cache_of_8_bits_takes_half_the_memory_and_nearly_says_the_same(start: Callable[..., Any]) -> None:
    plain, small = start(), start(attention="reference", kv_dtype="fp8_e4m3")
    assert small.kv.page_bytes * 4 == plain.kv.page_bytes
    prompt = tuple(range(3, 15))
    steps = [
        Step(0, (Row(0, prompt[:8], 0, (1, 2), Sampling()),)),
        Step(1, (Row(0, prompt[8:], 8, (1, 2, 3), Sampling()),)),
    ]
    for step in steps:
        want, got = plain.logits(step), small.logits(step)
        assert 0 < float((want - got).norm() / want.norm()) < 0.1
    small.poison([1])
    assert bool(small.logits(steps[1]).isnan().all())


def test_the_cache_takes_what_a_full_step_leaves_of_the_memory(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled.allocation.available_memory", lambda: 20 << 20)
    runner = start(kv_pages=None, eager=False, max_num_seqs=64, max_num_batched_tokens=64)
    left = int((20 << 20) * SHARE_OF_FREE_MEMORY) - runner.statistics()["step_bytes"]
    assert runner.kv.pages == left // runner.kv.page_bytes < 1 + 64 * 256 // 4, "not all that could ever be used"
    kept = runner.statistics()
    assert kept["graph_buckets"] == 1, "of the rehearsal's, those of pieces stay"
    captured: list[object] = []
    capture = runner.device.capture
    monkeypatch.setattr(runner.device, "capture", lambda *given: (captured.append(given), capture(*given))[1])
    runner.warmup()
    assert len(captured) == 2, "a graph of a whole pass has the addresses of the pages in it"
    assert runner.statistics()["graphs"] == kept["graphs"] + 2
    assert runner.submit(Step(1, (Row(0, (3, 5), 0, (1,), Sampling()),))).wait().tokens == (
        start(device="cpu").submit(Step(1, (Row(0, (3, 5), 0, (1,), Sampling()),))).wait().tokens
    )


def test_inputs_travel_in_one_copy_from_memory_that_is_not_touched_before_they_are_there() -> None:
    device = Recording()
    inputs = Inputs(device)
    for turn in range(5):
        parcel = Parcel()
        arrays = [
            np.arange(turn, 9 + 40 * turn),
            np.full((2, 3), 0.5 + turn),
            np.zeros(0, np.float32),
            np.array([7], np.uint8),
        ]
        numbers = [parcel.add(array) for array in arrays]
        before = device.begun()
        sent = inputs.send(parcel)
        assert device.begun() == before + 1
        assert all(np.array_equal(sent[number].numpy(), array) for number, array in zip(numbers, arrays, strict=True))
    device.synchronize()


def test_results_have_memory_of_their_own_until_they_are_read() -> None:
    device = Recording()
    outputs = Outputs(device)
    arrivals = [outputs.fetch([torch.full((3,), i), torch.tensor([i / 2])]) for i in range(3)]
    for i, arrival in enumerate(arrivals):
        assert [one.tolist() for one in arrival.wait()] == [[i] * 3, [i / 2]]
