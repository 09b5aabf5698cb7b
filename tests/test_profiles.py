"""A slow-down planted into a real, compiled piece is found by the comparison; baselines are kept by hardware."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from compiled.program import Entry, Program
from compiled.recipe import Run
from compiled.runner import CpuRunner, RunnerOptions, build_runner
from compiled.step import Row, Sampling, Step
from compiled.timeline import Measure
from profiles import compare as comparison
from profiles import harness
from streamengine import scenarios
from streamengine.errors import InvalidRequest
from streamengine.profile.diff import compare, share
from streamengine.profile.record import Hardware, Profile, encode, read
from streamengine.profile.summary import Circumstances, summarise
from tests.compiled import tiny
from tests.profiles import LAST, burning, profile

STEPS = 8
SLEEP_S = 0.02
"""A hundred times what a piece of this model takes: more than a busy machine can add to the fastest of eight."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CpuRunner:
    folder = tiny.make(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=4)
    options = RunnerOptions(model=str(folder), dtype="float32", page_size=4, kv_pages=40, max_num_seqs=4, threads=1)
    built = build_runner(options, lambda *_: None)
    assert isinstance(built, CpuRunner)
    return built


def measured(runner: CpuRunner) -> Profile:
    """Of a few decoding steps of two rows."""
    pages = {0: tuple(range(1, 9)), 1: tuple(range(9, 17))}
    runner.profile(Measure(steps=STEPS))
    for number in range(STEPS):
        rows = tuple(Row(slot, (5,), number, pages[slot], Sampling()) for slot in pages)
        runner.submit(Step(number, rows)).wait()
    window = runner.profiled()
    assert window is not None
    there = Circumstances(
        model=runner.model,
        eager=False,
        scenario="decode",
        created="2026-11-29T21:00:00+00:00",
        hardware=Hardware(cpu="any", cores=1, threads=1),
        ceilings=None,
    )
    return summarise(window, there)


def planted(program: Program, chosen: Callable[[Run], bool]) -> Program:
    """The same program with an operation that sleeps inserted into what is ``chosen``."""

    def insert(entry: Entry) -> Entry:
        function = entry.function
        if function is None or not isinstance(entry.call, Run) or not chosen(entry.call):
            return entry

        def call(arguments: list[Any]) -> Sequence[Any]:
            time.sleep(SLEEP_S)
            return function(arguments)

        return replace(entry, function=call)

    return program.with_entries([insert(entry) for entry in program.entries])


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("norm+lm_head", "o_proj+post_attention_layernorm+mlp | norm+lm_head"),
        (
            "layers.2: input_layernorm+q_proj+k_proj+v_proj",
            "o_proj+post_attention_layernorm+mlp | input_layernorm+q_proj+k_proj+v_proj",
        ),
    ],
)
def test_a_planted_slow_down_is_found_under_the_name_of_its_piece(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    before = measured(runner)
    program = planted(runner._stages.run, lambda call: call.name.endswith(where))  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "_stages", replace(runner._stages, run=program))
    difference = compare(before, measured(runner), threshold=0.5)
    worst = difference.changes[0]
    assert (worst.name, worst.slower) == (name, True)
    assert difference.step.slower
    assert worst.growth_s > SLEEP_S / 2
    assert any(where in reason for reason in worst.why) == where.startswith("layers.2")


def test_a_baseline_is_named_after_its_hardware_and_compares_with_what_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "BASELINES", tmp_path)
    scenario = harness.Scenario("decode", "decode", steps=10)
    path = harness.baseline(scenario, profile())
    assert path.name == "decode--smollm2-135m--bfloat16--amd-epyc-9r14--2-cores--2-threads.json"
    harness.keep(profile(), path)
    kept = read(path)
    assert all(piece.code is None and not piece.kernels for piece in kept.pieces)
    assert not compare(kept, profile()).slower
    assert {change.name for change in compare(kept, profile(burning("lm_head", 1e-3))).changes if change.slower} == {
        LAST
    }


def test_scenarios_are_compared_with_what_was_kept_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    today = [profile()]

    def run(scenario: harness.Scenario, model: str, runs: int) -> Path:
        (tmp_path / "profile.json").write_bytes(encode(today[-1]))
        return tmp_path

    def compared(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["compare", "decode", *arguments])
        return comparison.main(), capsys.readouterr().out

    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "HERE", tmp_path)
    monkeypatch.setattr(harness, "BASELINES", tmp_path / "baselines")
    status, told = compared()
    assert status == 0 and "there is none for this machine" in told
    assert compared("--keep")[0] == 0
    assert compared()[0] == 0
    today.append(profile(burning("lm_head", 1e-3)))
    status, told = compared()
    assert status == 1 and f"{LAST} @T≤8" in told
    assert compared("--threshold", "80%")[0] == 0


@pytest.mark.parametrize(
    "path", sorted((Path(harness.__file__).parent / "scenarios").glob("*.py")), ids=lambda path: path.stem
)
def test_every_scenario_is_one_that_the_command_line_knows(path: Path) -> None:
    scenario = import_module(f"profiles.scenarios.{path.stem}").SCENARIO
    assert scenario.name == path.stem
    assert scenario.kind in get_args(scenarios.Name)
    options = dict(zip(scenario.options[::2], map(int, scenario.options[1::2]), strict=True))
    assert options.keys() <= {"--batch", "--context"}
    load = scenarios.load_of(scenario.kind, options.get("--batch", 8), options.get("--context"), 2 * scenario.steps)
    assert load.context + load.tokens < 2048, "of a sequence, in what the smallest model has"


@pytest.mark.parametrize("path", sorted(harness.BASELINES.glob("*.json")), ids=lambda path: path.stem)
def test_every_baseline_can_be_read_and_is_where_it_would_be_looked_for(path: Path) -> None:
    kept = read(path)
    name = path.stem.split("--")[0]
    assert harness.baseline(import_module(f"profiles.scenarios.{name}").SCENARIO, kept) == path
    assert not compare(kept, kept).slower


@pytest.mark.parametrize("text", ["5", "0%", "-1%", "much", ""])
def test_a_threshold_that_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="threshold"):
        share(text)
