"""The planner: what a simulation may never lose, and where its figures are known without one."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from compiled.step import KVSpec, ModelSpec, Sampling
from streamengine import cli
from streamengine.config import EngineConfig
from streamengine.engine import Engine
from streamengine.errors import StartupError
from streamengine.planner import times
from streamengine.planner.fleet import Fleet
from streamengine.planner.report import Report, Targets
from streamengine.planner.state import Plan
from streamengine.planner.times import Shape, StepTimes, fit
from streamengine.planner.workload import BLOCK, Distinct, Job, Load, Workload, mooncake, recorded
from streamengine.replay import read
from streamengine.request import Request
from streamengine.sampling import SamplingParams
from streamengine.trace import VERSION, Aborted, Landed, Line, Opened, Planned, Submitted, Told
from tests.fakes import FakeRunner
from tests.streamengine.test_trace import serve

TIMES = StepTimes(source="a test", base_s=0.01, prompt_token_s=1e-4, decode_token_s=5e-4, host_s=1e-3)


def plan(*, pages: int = 2048, times: StepTimes = TIMES, config: dict[str, Any] | None = None, **options: Any) -> Plan:
    return Plan(
        config=EngineConfig(**({"debug": True} | (config or {}))),
        model=ModelSpec("m", "", "", "", vocab_size=2**63, max_model_len=4096, eos_token_ids=()),
        kv=KVSpec(pages, 16, page_bytes=1 << 16),
        times=times,
        targets=Targets(ttft_ms=500, itl_ms=50),
        **options,
    )


def jobs(*requests: tuple[float, int, int], cancel_at: float = math.inf) -> Workload:
    """Of ``(arrival, prompt tokens, answer tokens)``."""
    made = [
        Job(
            at,
            Request(
                id=id, prompt=tuple(range(id * 10_000, id * 10_000 + prompt)), max_tokens=answer, sampling=Sampling()
            ),
            cancel_at,
        )
        for id, (at, prompt, answer) in enumerate(requests)
    ]
    return Workload("a test", iter(made), Distinct())


def figures(report: Report) -> Report:
    return msgspec.structs.replace(report, wall_s=0.0)


def test_one_request_alone_takes_the_times_of_its_steps() -> None:
    report = Fleet(plan(), jobs((1.0, 100, 3))).run()
    assert report.ttft_ms.max == pytest.approx(10 + 10)
    assert report.itl_ms.mean == pytest.approx(1 + 10 + 0.5)
    assert (report.ends, report.steps, report.label) == ({"length": 1}, 3, "simulated, step times from a test")


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_requests_of_one_token_wait_as_long_as_queueing_theory_says(load: float) -> None:
    """M/D/1: Poisson arrivals, one server, a constant time S of service. The mean wait is load · S / 2(1 - load)."""
    service = 0.02
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_queue": 10_000, "debug": False}
    poisson = Load(rate=load / service, seconds=8_000 * service / load, prompt_tokens=16, answer_tokens=1)
    fixed = StepTimes(source="a test", base_s=service)
    report = Fleet(plan(times=fixed, config=config), poisson.open()).run()
    expected = service + load * service / (2 * (1 - load))
    assert report.ttft_ms.mean == pytest.approx(1e3 * expected, rel=0.08)
    assert report.utilisation == pytest.approx(load, rel=0.05)


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    def run(seed: int) -> Report:
        load = Load(rate=8, seconds=6, prompt_tokens=200, prompt_cv=1, answer_tokens=30, answer_cv=0.5, seed=seed)
        spread = msgspec.structs.replace(TIMES, speeds=((0.0, 0.8), (1.0, 1.0), (3.0, 0.5), (4.0, 1.0)))
        return figures(Fleet(plan(times=spread, replicas=2, mtbf_s=4, repair_s=1, seed=seed), load.open()).run())

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_requests_end_once_and_with_all_their_tokens_while_replicas_die_and_pages_are_short() -> None:
    load = Load(rate=12, seconds=30, prompt_tokens=150, prompt_cv=0.5, answer_tokens=60, shared_tokens=48, prefixes=3)
    fleet = Fleet(plan(pages=100, replicas=3, mtbf_s=8, repair_s=2), load.open())
    report = fleet.run()
    assert report.failures > 3 and report.resent > 3 and report.preemptions > 0
    assert report.ends == {"length": report.requests}
    assert {outcome.tokens for outcome in fleet.outcomes} == {60}


def test_who_goes_away_is_cancelled_and_gives_everything_back() -> None:
    report = Fleet(plan(), jobs((0.0, 100, 1000), (0.5, 100, 3), cancel_at=1.0)).run()
    assert report.ends == {"cancelled": 1, "length": 1}
    assert report.seconds == pytest.approx(1.0, abs=0.02)


def test_what_does_not_fit_is_refused_and_the_others_are_answered() -> None:
    report = Fleet(plan(), jobs((0.0, 5000, 10), (0.0, 100, 10))).run()
    assert report.ends == {"context_length_exceeded": 1, "length": 1}


def test_while_nobody_is_alive_requests_wait_for_the_first_that_comes_back() -> None:
    fleet = Fleet(plan(mtbf_s=0.05, repair_s=5.0, seed=3), jobs(*[(0.01 * i, 100, 2) for i in range(40)]))
    report = fleet.run()
    assert report.failures and report.ttft_ms.max is not None and report.ttft_ms.max > 5000
    assert sum(report.ends.values()) == 40


def test_a_shared_beginning_is_computed_once_for_each_replica() -> None:
    """640 tokens of which 320 are shared: of 20 requests, one after another, 19 find 20 of their 40 pages."""
    load = Load(rate=0.1, seconds=1000, prompt_tokens=640, answer_tokens=2, shared_tokens=320)
    report = Fleet(plan(), load.open()).run()
    assert report.hit_rate == pytest.approx(0.5 * (1 - 1 / report.requests), rel=0.01)


def test_a_thousand_replicas_share_the_load() -> None:
    load = Load(rate=1000, seconds=2, prompt_tokens=64, answer_tokens=4)
    fleet = Fleet(plan(pages=64, replicas=1000, config={"debug": False}), load.open())
    report = fleet.run()
    assert report.ends == {"length": report.requests}
    assert report.ttft_ms.max == pytest.approx(10 + 6.4), "with a replica for each, nobody waits"


# prefill apart from decode

APART: dict[str, Any] = {"prefill": 1, "prefill_threshold": 32, "bytes_per_s": 1e9, "latency_s": 2e-3}


def test_a_prompt_goes_to_the_other_replica_and_its_pages_come_back() -> None:
    report = Fleet(plan(**APART), jobs((1.0, 100, 3))).run()
    assert report.ttft_ms.max == pytest.approx(2 + 10 + 10 + 2)
    pages = 7 * (1 << 16) / 1e9 * 1e3
    assert report.itl_ms.max == pytest.approx(2 + pages + 10 + 0.5, abs=1e-3)
    assert report.transfers == {"sent": 1, "landed": 1, "fallbacks": 0, "bytes": 7 * (1 << 16)}
    assert report.prefill_utilisation is not None and report.prefill_utilisation > 0


def test_reads_over_one_link_follow_each_other() -> None:
    """The second prompt is computed 21 ms after the first, and read when that has been read."""
    report = Fleet(plan(**APART | {"bytes_per_s": 1e6}), jobs((1.0, 100, 2), (1.0, 100, 2))).run()
    pages = 7 * (1 << 16) / 1e6 * 1e3
    assert report.itl_ms.max == pytest.approx(2 + 2 * pages + 10.5 - 21, abs=1e-2)


def test_short_prompts_stay_where_they_are() -> None:
    report = Fleet(plan(**APART), jobs((1.0, 31, 3))).run()
    assert (report.transfers["sent"], report.steps) == (0, 3)


def test_a_link_that_is_too_slow_is_given_up_and_the_prompts_are_computed_here() -> None:
    """A read takes 46 s: the deadline is after 30. What it writes to stays taken until it is over."""
    report = Fleet(plan(**APART | {"bytes_per_s": 1e4}), jobs((0.0, 100, 3))).run()
    assert report.ends == {"length": 1}
    assert (report.transfers["landed"], report.transfers["fallbacks"]) == (0, 1)
    assert report.ttft_ms.max is not None and report.ttft_ms.max < 30, "the first token was there with the handle"
    assert report.itl_ms.max is not None and report.itl_ms.max > 29_900


def test_prompts_that_are_computed_elsewhere_do_not_hold_up_answers() -> None:
    load = Load(rate=3, seconds=30, prompt_tokens=1000, answer_tokens=50)
    together = Fleet(plan(replicas=2, config={"debug": False}), load.open()).run()
    apart = Fleet(plan(**APART, config={"debug": False}), load.open()).run()
    assert together.itl_ms.p99 is not None and apart.itl_ms.p99 is not None
    assert apart.itl_ms.p99 < together.itl_ms.p99 / 2
    assert apart.transfers["landed"] == apart.requests


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_while_replicas_of_both_kinds_die(seed: int) -> None:
    load = Load(rate=8, seconds=15, prompt_tokens=200, prompt_cv=0.5, answer_tokens=20, seed=seed)
    options = APART | {"prefill": 2, "replicas": 3, "bytes_per_s": 5e6, "mtbf_s": 5, "repair_s": 1, "seed": seed}
    fleet = Fleet(plan(pages=200, **options), load.open())
    report = fleet.run()
    assert report.failures > 5 and report.transfers["landed"] > 20 and report.transfers["fallbacks"]
    assert report.ends == {"length": report.requests}
    assert [outcome.tokens for outcome in fleet.outcomes] == [20] * report.requests


# step times


def test_a_line_through_exact_steps_is_found_again() -> None:
    true = StepTimes(
        source="", base_s=0.012, prompt_token_s=1.4e-3, prompt_pair_s=2e-7, decode_token_s=1.6e-3, decode_key_s=3e-6
    )
    shapes = [
        Shape(prompt, prompt * (prompt + 1) // 2 + prompt * behind, rows, rows * context)
        for prompt, behind in ((0, 0), (16, 0), (200, 512), (512, 0), (512, 1024))
        for rows, context in ((0, 0), (1, 40), (8, 300), (32, 900))
        if prompt or rows
    ]
    found = fit("", [(shape, true.middle(shape)) for shape in shapes])
    for shape in shapes:
        assert found.middle(shape) == pytest.approx(true.middle(shape), rel=0.02)


def test_a_line_says_what_steps_take_together_a_few_slow_ones_among_them() -> None:
    steps = [
        (Shape(0, 0, rows, 100 * rows), (0.01 + 0.001 * rows) * (5 if i % 20 == 0 else 1))
        for i in range(800)
        for rows in (1 + i % 7,)
    ]
    found = fit("", steps)
    assert sum(found.middle(shape) for shape, _ in steps) == pytest.approx(sum(time for _, time in steps), rel=0.02)


def test_the_figures_of_bench_steps_are_step_times(tmp_path: Path) -> None:
    found = {
        "scenario": "steps",
        "decode": [{"batch": batch, "ms": 10 + batch} for batch in (1, 8, 32)],
        "prefill": [{"tokens": tokens, "ms": 10 + tokens / 2} for tokens in (128, 512, 2048)],
    }
    file = tmp_path / "bench"
    file.write_text(f"ceilings read 20 GB/s\n{json.dumps(found)}\n")
    line = times.read(str(file))
    assert line.middle(Shape(0, 0, 16, 16 * 128)) == pytest.approx(0.026, rel=0.02)
    assert line.middle(Shape(1024, 1024 * 1025 // 2)) == pytest.approx(0.522, rel=0.02)


@pytest.mark.parametrize("text", ["", "[]", '{"scenario": "serve"}', '{"source": "x", "base_s": -1}', '{"base": 1}'])
def test_what_is_no_step_times_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(StartupError, match=r"times"):
        times.read(str(file))


# files


def test_step_times_can_be_printed_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.json"
    file.write_bytes(msgspec.json.encode(TIMES))
    assert cli.run(["plan", "--times", str(file), "--times-only"]) == 0
    file.write_text(capsys.readouterr().out)
    assert times.read(str(file)) == TIMES


def test_equal_hashes_of_mooncake_are_equal_tokens() -> None:
    lines = [
        {"timestamp": 0, "input_length": 2 * BLOCK, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 60_000, "input_length": 2 * BLOCK, "output_length": 2, "hash_ids": [1, 3]},
        {"timestamp": 30_000, "input_length": 2 * BLOCK + 10, "output_length": 3, "hash_ids": [1, 2, 4]},
    ]
    report = Fleet(plan(), mooncake("a trace", "\n".join(map(json.dumps, lines)))).run()
    assert (report.requests, report.seconds > 60) == (3, True)
    assert report.hit_rate == pytest.approx((2 * BLOCK + BLOCK) / (6 * BLOCK + 10), rel=0.02)


def test_a_line_of_another_format_is_told_by_its_number() -> None:
    with pytest.raises(StartupError, match="line 2 of it"):
        mooncake("it", '{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": []}\n{"a": 1}')


# the command


def test_a_sweep_prints_every_fleet_and_says_that_it_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.json"
    file.write_bytes(msgspec.json.encode(TIMES))
    arguments = [
        "plan",
        "--times",
        str(file),
        "--kv-pages",
        "512",
        "--rate",
        "4",
        "--seconds",
        "5",
        "--replicas",
        "1,2",
    ]
    assert cli.run(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("requests/s within the targets") == 2
    assert text.splitlines()[-1].startswith("simulated, step times from a test; Poisson arrivals of 4 requests/s")
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["label"] == "simulated, step times from a test"
    assert [report["replicas"] for report in found["reports"]] == [1, 2]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "a plan takes either rate or workload"),
        (["--rate", "1", "--workload", "x"], "a plan takes either rate or workload"),
        (["--workload", "x", "--prompt-tokens", "9"], "prompt_tokens is for made-up requests"),
        (["--workload", "nowhere", "--kv-pages", "99"], "the workload cannot be read"),
        (["--rate", "1"], "give kv_pages"),
        (["--rate", "1", "--kv-pages", "99", "--prefill", "1"], "give token_bytes"),
        (["--rate", "1", "--kv-pages", "99", "--replicas", "1,x"], "replicas must be numbers from 1 to 10000"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    file = tmp_path / "times.json"
    file.write_bytes(msgspec.json.encode(TIMES))
    assert cli.run(["plan", "--times", str(file), *options]) == 2
    assert complaint in capsys.readouterr().err


def test_the_trace_of_a_core_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler of the simulation gives each request what the core's did."""

    async def many(engine: Engine, runner: FakeRunner) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(12):
                sampling = SamplingParams(temperature=0, max_tokens=1 + number)
                ask = partial(engine.generate, f"the same beginning, then {number}", sampling=sampling)
                tasks.start_soon(ask)

    file, steps = tmp_path / "trace", tmp_path / "times.json"
    serve(file, many)
    steps.write_bytes(msgspec.json.encode(TIMES))
    told = [told for line in read(str(file)) if isinstance(line, Landed) for told in line.answers]
    arguments = ["--workload", str(file), "--page-size", "4", "--kv-pages", "64", "--max-num-seqs", "4", "--json"]
    assert cli.run(["plan", "--times", str(steps), *arguments]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert (report["workload"], report["ends"]) == ("the arrivals in the trace trace", {"length": 12})
    assert round(report["tokens_per_s"] * report["seconds"]) == sum(answer.count for answer in told)
    assert report["hit_rate"] > 0


def test_of_a_trace_refusals_are_asked_again_and_only_who_went_away_goes_away() -> None:
    asked = Request(id=0, prompt=(), max_tokens=40, sampling=Sampling())
    lines: list[Line] = [
        *[Submitted(5.0, msgspec.structs.replace(asked, id=id), length=20) for id in (-1, 1, 2, 3)],
        Aborted(5.0, 1, "overloaded"),
        Aborted(5.1, 2, "client"),
        Aborted(5.2, 3, "shutdown"),
    ]
    fleet = Fleet(plan(), recorded("it", 16, lines))
    assert fleet.run().ends == {"length": 2, "cancelled": 1}
    assert [outcome.tokens == 40 for outcome in fleet.outcomes] == [True, False, True]


def test_step_times_of_a_trace_are_of_its_steps_and_of_what_lies_between_them() -> None:
    config = EngineConfig()
    model = ModelSpec("m", "", "", "", vocab_size=9, max_model_len=99, eos_token_ids=())
    opened = Opened(VERSION, config, model, KVSpec(9, 16, 1), depth=1)
    request = Request(id=1, prompt=(), max_tokens=9, sampling=Sampling())
    lines: list[Line] = [Submitted(1.0, request, length=20)]
    shapes = [(0, 20, 1), *[(20 + i, 1, 1) for i in range(8)]]
    for number, (start, tokens, sampled) in enumerate(shapes, 1):
        at = 1.0 + 0.03 * number
        seconds = 0.01 + (0.01 if tokens > 1 else 0.0)
        lines.append(Planned(at, number, ((1, start, tokens, sampled),)))
        lines.append(Landed(at + seconds, number, seconds, (Told(1, 0, 1),)))
    found = times.of_trace("it", opened, lines)
    assert found.host_s == pytest.approx(0.02)
    assert found.middle(Shape(0, 0, 1, 25)) == pytest.approx(0.01, rel=0.02)
    assert found.middle(Shape(20, 210)) == pytest.approx(0.02, rel=0.02)
    assert (found.depth, found.max_model_len) == (1, 99)
    assert [speed for _, speed in found.speeds] == pytest.approx([1] * 10, rel=0.02)


def test_a_long_step_takes_the_mean_of_the_speeds_of_its_time_and_a_short_one_that_of_its_moment() -> None:
    speeds = ((0.0, 1.0), (1.0, 0.25), (2.0, 1.0), (3.0, 1.0))
    line = StepTimes(source="", base_s=0.0, prompt_token_s=0.1, speeds=speeds)
    assert line.seconds(Shape(1), 0.5) == pytest.approx(0.1)
    assert line.seconds(Shape(1), 4.5) == pytest.approx(0.4), "after 3 s it begins again"
    assert line.seconds(Shape(10), 0.5) == pytest.approx(0.5 + 1 + 0.25)
    assert line.seconds(Shape(90), 0.0) == pytest.approx(4 * 3)
