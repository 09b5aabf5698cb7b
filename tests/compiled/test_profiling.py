"""Measured steps are the same steps, every call of them is seen once, and an unmeasured runner does not know of it."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled.inductor import Call
from compiled.profiling import Recorder
from compiled.program import Program
from compiled.recipe import Run
from compiled.runner import CpuRunner, RunnerOptions, build_runner
from compiled.step import Row, Sampling, Step, StepResult
from compiled.timeline import Measure, Window
from compiled.weights import cache_folder
from tests.compiled import caches, tiny

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 3, 64, 112, 4, 2, 16
BATCH = 3


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this module, but with the kernels that this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches.apart(tmp_path_factory.mktemp("cache"))))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=LAYERS)


def build(model: Path, **changes: Any) -> CpuRunner:
    options: dict[str, Any] = {"page_size": 4, "kv_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    asked = RunnerOptions(**({"model": str(model), "dtype": "float32", **options} | changes))
    runner = build_runner(asked, lambda *_: None)
    assert isinstance(runner, CpuRunner)
    runner.warmup()
    return runner


@pytest.fixture(scope="module")
def cold(model: Path, cache: None) -> CpuRunner:
    return build(model)


@pytest.fixture(scope="module")
def warm(model: Path, cold: CpuRunner) -> CpuRunner:
    return build(model)


def decoding(number: int, rows: int = BATCH) -> Step:
    """A token each, at position 9 + ``number``."""
    start = 9 + number % 4
    taken = [tuple(range(1 + 4 * i, 5 + 4 * i)) for i in range(rows)]
    return Step(number, tuple(Row(i, (5 + i,), start, pages, Sampling(logprobs=0)) for i, pages in enumerate(taken)))


def run(runner: CpuRunner, count: int, first: int = 0) -> list[StepResult]:
    return [runner.submit(decoding(first + i)).wait() for i in range(count)]


def measure(runner: CpuRunner, steps: int, plain: int = 0, trace: Path | None = None) -> Window:
    runner.profile(Measure(steps, plain, None if trace is None else str(trace)))
    run(runner, steps + plain)
    window = runner.profiled()
    assert window is not None
    return window


def program(runner: CpuRunner) -> Program:
    found = runner._stages.run
    assert isinstance(found, Program)
    return found


def test_a_runner_runs_the_very_same_list_of_calls_before_beside_and_after_a_profile(warm: CpuRunner) -> None:
    stages, entries = warm._stages, program(warm).entries
    functions = [entry.function for entry in entries]
    ran: list[Any] = []
    warm.profile(Measure(steps=1, plain=2))
    original = Program.__call__

    def spy(self: Program, *arguments: Any) -> Any:
        ran.append(self.entries)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__call__", spy)
        run(warm, 4)
    assert [one is entries for one in ran] == [True, True, False, True]
    assert warm.profiled() is not None
    assert (warm._stages, warm._measured, warm._recorder) == (stages, stages, None)
    assert [entry.function for entry in program(warm).entries] == functions


def test_measured_steps_give_the_tokens_that_unmeasured_ones_give(warm: CpuRunner) -> None:
    expected = [result.tokens for result in run(warm, 6)]
    warm.profile(Measure(steps=4, plain=1))
    assert [result.tokens for result in run(warm, 6)] == expected
    assert warm.profiled() is not None


def test_each_call_of_each_step_is_seen_once_in_order_and_no_two_at_a_time(warm: CpuRunner) -> None:
    window = measure(warm, 5, plain=2)
    names = [place.name for place in window.places]
    assert names[:3] == [
        "embed_tokens+rotary_emb | layers.0: input_layernorm+q_proj+k_proj+v_proj",
        "layers.0: attention",
        "layers.0: o_proj+post_attention_layernorm+mlp | layers.1: input_layernorm+q_proj+k_proj+v_proj",
    ]
    assert names[2 * LAYERS + 1 :] == ["host: batch", "host: plan", "host: sample", "host: logprobs"]
    assert (len(window.plain), len(window.steps), window.device) == (2, 5, "cpu")
    for step in window.steps:
        seen = [names[span.place] for span in step.spans]
        calls = names[: 2 * LAYERS + 1]
        assert seen == ["host: batch", "host: plan", *calls, "host: sample", "host: logprobs"]
        ends = [0.0, *(span.start + span.seconds for span in step.spans)]
        assert all(end <= span.start for end, span in zip(ends, step.spans, strict=False))
        assert sum(span.seconds for span in step.spans) < step.seconds
        assert (step.rows, step.tokens, step.bucket) == (BATCH, BATCH, 4)


def test_what_a_call_had_to_do_is_counted_from_its_graph_and_from_lengths(warm: CpuRunner) -> None:
    (step,) = measure(warm, 1).steps
    middle, attention = step.spans[4], step.spans[3]
    query, both = HEADS * SIZE, 2 * KV_HEADS * SIZE
    weights = HIDDEN * query + 2 * HIDDEN * 128 + HIDDEN * INNER + HIDDEN * (query + both) + 2 * HIDDEN
    # 112 inner features are packed in panels of 32: gate and up together are 7 panels, down has 112 inputs.
    weights += HIDDEN * 224 - 2 * HIDDEN * 128
    activations = BATCH * (query + HIDDEN + HIDDEN + query + both + 2 * SIZE)
    assert middle.bytes == 4 * (weights + activations)
    products = 2 * (HIDDEN * query + 3 * HIDDEN * INNER + HIDDEN * (query + both))
    assert middle.flops is not None
    assert BATCH * products < middle.flops < BATCH * products * 1.05
    positions = 9  # of each row, before its token
    assert attention.bytes == 4 * BATCH * (2 * query + 2 * both + positions * both)
    assert attention.flops == 2 * BATCH * HEADS * 2 * SIZE * (positions + 1)


def test_a_step_that_fails_is_not_in_the_window(warm: CpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    warm.profile(Measure(steps=2))
    run(warm, 1)
    with monkeypatch.context() as patch:
        patch.setattr(warm, "_attention", None)
        with pytest.raises(AttributeError):
            warm.submit(decoding(7))
    run(warm, 1, first=8)
    window = warm.profiled()
    assert window is not None
    assert [step.number for step in window.steps] == [0, 8]


def test_a_window_that_is_stopped_holds_what_came_until_then(warm: CpuRunner) -> None:
    warm.profile(Measure(steps=50))
    run(warm, 2)
    assert warm.profiled() is None
    window = warm.profiled(stop=True)
    assert window is not None
    assert len(window.steps) == 2
    assert warm.profiled(stop=True) is None


def test_a_trace_names_every_call_by_place_and_bucket_and_every_kernel(warm: CpuRunner, tmp_path: Path) -> None:
    scopes = [vars_of(entry.function) for entry in program(warm).entries if entry.function is not None]
    before = [dict(scope) for scope in scopes]
    window = measure(warm, 2, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    for place in window.places:
        assert names.count(f"{place.name} @T=4") == 2
    kernels = {name for piece in window.pieces for name in piece.kernels or ()}
    assert len(kernels) > 2
    assert kernels <= set(names)
    assert [scope == was for scope, was in zip(scopes, before, strict=True)] == [True] * len(scopes)


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_measured(warm: CpuRunner, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"trace\.json"):
        warm.profile(Measure(steps=1, trace=str(tmp_path / "nowhere" / "trace.json")))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe is no file"):
        warm.profile(Measure(steps=1, trace=str(pipe)))
    assert pipe.is_fifo()
    run(warm, 1)
    assert warm.profiled(stop=True) is None


def vars_of(function: Call) -> dict[str, Any]:
    scope: dict[str, Any] = getattr(function, "__func__", function).__globals__
    return scope


def test_a_warm_start_knows_of_its_pieces_what_the_cold_one_knew(cold: CpuRunner, warm: CpuRunner) -> None:
    before, after = measure(cold, 1).pieces, measure(warm, 1).pieces
    assert len(after) == len({call.key for call in calls(warm)}) == 3
    for one, other in zip(before, after, strict=True):
        assert (one.found, one.missed, other.found, other.missed) == (False, "nothing is saved for it yet", True, None)
        for name in ("key", "places", "work", "graph", "code", "kernels", "seconds"):
            assert getattr(one, name) == getattr(other, name)
        assert other.work is not None
        assert other.work.uncounted == ()
        assert "torch.ops.streamengine.linear" in (other.graph or "")
        assert str(Path(__file__).parent.parent.parent) not in (other.graph or "")
        assert set(other.seconds or ()) == {"trace", "lower", "codegen", "cxx", "cxx_pieces"}
        assert all(seconds > 0 for seconds in (other.seconds or {}).values())
        assert all("kernel(" in source for source in (other.kernels or {}).values())
        assert all(f"{name} = kernel(" in (other.code or "") for name in other.kernels or ())


def calls(runner: CpuRunner) -> list[Run]:
    return [entry.call for entry in program(runner).entries if isinstance(entry.call, Run)]


def test_an_entry_that_says_nothing_of_its_making_is_used_and_told_as_unknown(
    model: Path, cold: CpuRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cache_folder(), tmp_path / "streamengine", symlinks=True)
    for manifest in (tmp_path / "streamengine" / "compiled").glob("piece-*/manifest.json"):
        told = json.loads(manifest.read_text())
        del told["files"]["making.json"]
        manifest.write_text(json.dumps(told))
        (manifest.parent / "making.json").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    window = measure(build(model), 1)
    assert [(piece.found, piece.kernels, piece.seconds) for piece in window.pieces] == [(True, {}, {})] * 3
    assert all(piece.work is not None for piece in window.pieces)


def test_an_uncompiled_model_is_measured_from_attention_to_attention(model: Path) -> None:
    window = measure(build(model, eager=True), 2)
    names = [place.name for place in window.places[: 2 * LAYERS + 1]]
    assert names[1::2] == [f"layers.{layer}: attention" for layer in range(LAYERS)]
    assert (names[0], names[-1]) == ("uncompiled, before layers.0: attention", "uncompiled, after layers.2: attention")
    for step in window.steps:
        assert [span.place for span in step.spans[2:-2]] == list(range(2 * LAYERS + 1))
        assert sum(span.seconds for span in step.spans) > 0.5 * step.seconds
    assert window.pieces == ()


def test_on_cuda_calls_are_timed_by_events_that_nobody_waits_for_meanwhile(
    warm: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events of the test's own, since this machine may have no GPU: each takes a millisecond."""
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at: int | None = None
            made.append(self)

        def record(self) -> None:
            self.at = len(made)

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, other: "Event") -> float:
            assert self.at is not None
            assert other.at is not None
            return float(other.at - self.at)

    waited: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    entries, layers = program(warm), warm._layers
    recorder = Recorder(Measure(steps=1), entries, (), warm._about, layers, 4, torch.device("cuda", 0))
    stages = warm._stages
    with monkeypatch.context() as patch:
        patch.setattr(warm, "_measured", type(stages)(recorder.forward()))
        patch.setattr(warm, "_recorder", recorder)
        run(warm, 1)
        assert waited == []
        window = recorder.window()
    (step,) = window.steps
    assert window.device == "NVIDIA H200"
    assert [round(1000 * span.start) for span in step.spans] == [1 + 2 * i for i in range(2 * LAYERS + 1)]
    assert {span.seconds for span in step.spans} == {0.001}
