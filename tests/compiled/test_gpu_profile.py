"""Steps that are measured while others are in flight and graphs are replayed before and after them, on the recording
device."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from compiled import ceilings, profiling
from compiled.gpu.runner import GpuRunner
from compiled.program import Program
from compiled.runner import RunnerOptions, build_runner
from compiled.step import Handle, Row, Sampling, Step
from compiled.timeline import Measure, Window
from streamengine.profile.record import Hardware
from streamengine.profile.summary import Circumstances, summarise
from tests.compiled import tiny

LAYERS, ROWS, PROMPT = 2, 3, (3, 5, 7)
STAGES = ["batch", "send", "plan", "masks", "sample", "logprobs"]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GpuRunner]:
    folder = tiny.make(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=LAYERS)

    def start(**changes: Any) -> GpuRunner:
        fixed: dict[str, Any] = {"dtype": "float32", "page_size": 4, "kv_pages": 40, "max_num_seqs": 4}
        options = RunnerOptions(model=str(folder), device="recording", max_num_batched_tokens=32, **(fixed | changes))
        runner = build_runner(options, lambda *_: None)
        assert isinstance(runner, GpuRunner)
        runner.warmup()
        return runner

    return start


@pytest.fixture(scope="module")
def runner(build: Callable[..., GpuRunner]) -> GpuRunner:
    return build()


def answer(runner: GpuRunner, steps: int, ask: Callable[[int], object] = lambda number: None) -> list[list[int]]:
    """The tokens of `ROWS` answers: a step of prompts, then decoding ones with a step in flight. ``ask`` is called
    before each step."""
    in_flight: deque[Handle] = deque()
    tokens: list[list[int]] = [[] for _ in range(ROWS)]

    def land() -> None:
        for row, found in zip(tokens, in_flight.popleft().wait().tokens, strict=True):
            row.extend(found)

    for number in range(steps):
        ask(number)
        in_flight.append(runner.submit(step(number)))
        if len(in_flight) == runner.depth:
            land()
    land()
    return tokens


def step(number: int) -> Step:
    new = (0,) if number else PROMPT
    start = len(PROMPT) + number - 1 if number else 0
    return Step(
        number,
        tuple(
            Row(i, new, start, tuple(range(1 + 10 * i, 11 + 10 * i)), Sampling(logprobs=0), pending=number > 0)
            for i in range(ROWS)
        ),
    )


def asking(runner: GpuRunner, before: int, measure: Measure) -> Callable[[int], object]:
    return lambda number: runner.profile(measure) if number == before else None


def window_of(runner: GpuRunner) -> Window:
    window = runner.profiled()
    assert window is not None
    assert runner.profiled(stop=True) is None
    return window


def test_eight_steps_that_are_measured_in_flight_add_up_lose_no_token_and_leave_the_graphs(runner: GpuRunner) -> None:
    expected = answer(runner, 20)
    way, replayed = runner._way, list[float]()

    def ask(number: int) -> None:
        replayed.append(runner.statistics()["graph_steps_whole"])
        if number == 2:
            runner.profile(Measure(steps=8, plain=3))

    assert answer(runner, 20, ask) == expected
    assert [now - replayed[1] for now in replayed[1:]] == [0, 1, 2, 3, *[4] * 9, *range(5, 11)]
    window = window_of(runner)
    assert runner._way is runner._measured is way
    assert ([step.number for step in window.steps], len(window.plain)) == (list(range(5, 13)), 3)
    everything = sorted(range(len(window.places)))
    assert [place.name for place in window.places[2 * LAYERS + 1 :]] == [f"host: {name}" for name in STAGES]
    for step in window.steps:
        assert (step.rows, step.tokens, step.bucket) == (ROWS, ROWS, 4)
        assert sorted(span.place for span in step.spans) == everything
        ends = [0.0, *(span.start + span.seconds for span in step.spans)]
        assert all(end <= span.start for end, span in zip(ends, step.spans, strict=False))
        assert ends[-1] <= step.seconds
        assert all(span.flops for span in step.spans if window.places[span.place].kind != "host")
    there = Circumstances(
        model=runner.model,
        eager=False,
        scenario="live",
        created="2026-11-29T21:00:00+00:00",
        hardware=Hardware(cpu="any", cores=1, threads=1),
        ceilings=None,
    )
    profile = summarise(window, there)
    assert sum(call.total_s for call in profile.calls) + profile.host.seconds == pytest.approx(profile.step_s.total)
    assert sum(call.calls for call in profile.calls) == 8 * len(everything)


def test_an_unmeasured_step_runs_the_very_same_list_of_calls(runner: GpuRunner) -> None:
    program = runner.passes.forward
    assert isinstance(program, Program)
    entries = program.entries
    functions = [entry.function for entry in entries]
    answer(runner, 6, asking(runner, 1, Measure(steps=2)))
    window_of(runner)
    assert runner._way.passes is runner.passes
    assert runner.passes.forward is program
    assert program.entries is entries
    assert [entry.function for entry in entries] == functions


def test_a_window_that_is_stopped_holds_steps_that_nobody_has_waited_for(runner: GpuRunner) -> None:
    expected, windows = answer(runner, 6), []

    def ask(number: int) -> None:
        if number == 0:
            runner.profile(Measure(steps=50))
        elif number == 3:
            windows.append(runner.profiled(stop=True))

    assert answer(runner, 6, ask) == expected
    (window,) = windows
    assert window is not None
    assert [step.number for step in window.steps] == [0, 1, 2]


def test_a_step_that_fails_is_not_in_the_window_and_the_one_in_flight_is(runner: GpuRunner) -> None:
    expected = answer(runner, 6)

    def ask(number: int) -> None:
        if number == 2:
            runner.profile(Measure(steps=3))
        if number == 4:
            with pytest.raises(ValueError, match="kv_indices"):
                runner.submit(Step(99, (Row(9, (3, 5), 0, (4000,), Sampling()),)))

    assert answer(runner, 6, ask) == expected
    window = window_of(runner)
    assert [step.number for step in window.steps] == [2, 3, 4]


def test_a_trace_names_every_call_of_a_step_that_a_graph_would_have_hidden(runner: GpuRunner, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    answer(runner, 5, asking(runner, 2, Measure(steps=2, trace=str(path))))
    window = window_of(runner)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    for place in window.places:
        assert names.count(f"{place.name} @T=4") == 2


def test_an_uncompiled_model_is_measured_from_attention_to_attention(build: Callable[..., GpuRunner]) -> None:
    runner = build(eager=True)
    expected = answer(runner, 6)
    assert answer(runner, 6, asking(runner, 2, Measure(steps=2))) == expected
    window = window_of(runner)
    assert [place.name for place in window.places[1 : 2 * LAYERS : 2]] == ["layers.0: attention", "layers.1: attention"]
    for step in window.steps:
        assert sorted(span.place for span in step.spans) == list(range(len(window.places)))


def test_a_trace_is_refused_where_the_profiler_would_see_nothing_of_the_gpu(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profiling, "supported_activities", lambda: {ProfilerActivity.CPU})
    monkeypatch.setattr(runner.device, "torch", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"trace \S+trace\.json: torch \S+'s profiler does not see the GPU"):
        runner.profile(Measure(steps=1, trace=str(tmp_path / "trace.json")))
    assert not list(tmp_path.iterdir())
    assert runner.profiled(stop=True) is None


def test_ceilings_are_measured_between_two_steps_in_flight(runner: GpuRunner) -> None:
    expected, found = answer(runner, 6), dict[str, float]()

    def ask(number: int) -> None:
        if number == 3:
            found.update(runner.ceilings(), read_s=runner.plain_read(1000)())

    assert answer(runner, 6, ask) == expected
    assert found.keys() == {"read_gb_s", "multiply_gflop_s", "read_s"}
    assert all(value > 0 for value in found.values())


def test_on_cuda_a_ceiling_is_timed_between_events_on_a_stream_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events of the test's own, since this machine may have no GPU: their clock counts what was launched."""
    launched: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(launched)

        def synchronize(self) -> None:
            """Nothing is waited for."""

        def elapsed_time(self, other: "Event") -> float:
            return 1000.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert ceilings._seconds(lambda: launched.append(1), torch.device("cuda", 0)) == 1
    assert len(launched) == 2
