"""The benchmarks over fakes: that they measure what they say, not how fast it is."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from compiled.step import Runner, StepResult
from streamengine import bench, cli, compose
from streamengine.bench import guided, reuse, scheduling, serving, split, startup, steps
from streamengine.config import EngineConfig
from tests.fakes import ByteTokenizer, FakeHandle, FakeRunner, fake_kv, fake_model
from tests.streamengine.guided.drawn import runner_in


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """What the engines were opened with; each has a fake runner that copies what came 32 tokens before."""
    opened: list[EngineConfig] = []

    def build_runner(config: EngineConfig, report: object) -> Runner:
        opened.append(config)
        return FakeRunner(fake_kv(400, 16), fake_model(4096), answer=lambda context, sampling: context[-32])

    monkeypatch.setattr(compose, "build_runner", build_runner)
    for module in (compose, reuse):
        monkeypatch.setattr(module, "load_tokenizer", lambda folder: ByteTokenizer())
    return opened


def measured(scenario: bench.Scenario, **config: Any) -> tuple[list[str], dict[str, Any]]:
    shown: list[str] = []
    bench.run(scenario, EngineConfig(**config), lambda progress: None, shown.append)
    result = json.loads(shown[-1])
    assert result["scenario"] == scenario
    return shown[:-1], result


def test_scheduler_measures_plan_commit_and_message_without_a_model(monkeypatch, engines):
    monkeypatch.setattr(scheduling, "REQUESTS", 16)
    monkeypatch.setattr(scheduling, "STEPS", 5)
    (line,), result = measured("scheduler")
    assert "µs per request and step" in line
    assert result["total_us"] == pytest.approx(result["plan_us"] + result["commit_us"] + result["message_us"])
    assert engines == []


def test_prefix_compares_an_engine_with_the_cache_and_one_without(monkeypatch, engines):
    monkeypatch.setattr(reuse, "SHARING", 6)
    monkeypatch.setattr(reuse, "PREFIX", 64)
    _, result = measured("prefix")
    assert [config.enable_prefix_caching for config in engines] == [False, True]
    assert result["without_cache"]["cached_tokens"] == 0
    assert result["with_cache"]["cached_tokens"] == 6 * 64
    assert result["ratio"] > 0


def test_pd_compares_an_engine_that_is_alone_with_two_that_share_the_work(monkeypatch, engines):
    monkeypatch.setattr(compose, "build_runner", lambda *_: FakeRunner(fake_kv(400, 16), fake_model(4096), shared=True))
    monkeypatch.setattr(split, "PROCESSES", False)
    monkeypatch.setattr(split, "LENGTHS", (40, 64))
    monkeypatch.setattr(split, "REPEATS", 2)
    monkeypatch.setattr(split, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    lines, result = measured("pd")
    assert [(row["transport"], row["prompt_tokens"], row["equal"]) for row in result["rows"]] == [
        ("shared_memory", 40, True),
        ("shared_memory", 64, True),
    ]
    assert result["bytes_per_token"] == fake_kv(400, 16).page_bytes / 16
    for row in result["rows"]:
        assert row["ttft_ms"] >= row["first_token_ms"] > 0 and row["copy_ratio"] > 0 and row["moved_ms"] > 0
    assert "costs, not gains" in lines[-1]


def test_guided_compares_steps_with_and_without_masks(monkeypatch, tmp_path):
    monkeypatch.setattr(guided, "REPEATS", 2)
    monkeypatch.setattr(guided, "COMPILES", 2)
    monkeypatch.setattr(guided, "CONTEXT", 12)
    monkeypatch.setattr(guided, "HOSTILE", {name: guided.HOSTILE[name] for name in ("no end", "10,000 values")})
    monkeypatch.setattr(compose, "build_runner", lambda config, report: runner_in(tmp_path))
    monkeypatch.setattr(compose, "load_tokenizer", lambda folder: ByteTokenizer())
    real = compose.open_engine
    monkeypatch.setattr(compose, "open_engine", lambda config, progress: real(config, process=False))
    lines, result = measured("guided")
    assert [(row["kind"], row["batch"]) for row in result["batches"]] == [
        (kind, batch) for kind in ("greedy", "drawn") for batch in (1, 8, 32)
    ]
    assert all(row["mask_us_per_row"] > 0 and row["guided_ms"] > 0 for row in result["batches"])
    assert result["hostile"].keys() == {"nothing", "no end", "10,000 values", "all of these"}
    assert len(lines) == 6 + 1 + 4


def test_speculation_reports_acceptance_and_that_the_answers_are_equal(monkeypatch, engines):
    monkeypatch.setattr(reuse, "PASSAGE", "This line has thirty-two letters")
    _, result = measured("speculation")
    assert result["equal"]
    assert result["acceptance"] == 1
    assert result["drafted"] > result["tokens"] / 2


def test_steps_are_held_against_the_ceilings(monkeypatch):
    class Idle(FakeRunner):
        host_seconds = 0.0

        def submit(self, step):
            self.host_seconds += 0.001 * len(step.rows)
            handle = FakeHandle(self, step)
            handle.result = StepResult(step.number, tuple((0,) for _ in step.rows), 0.0)
            return handle

        def statistics(self):
            host = {"host_seconds": self.host_seconds, "sample_seconds": 2 * self.host_seconds}
            return {"read_bytes": 1e6, "flop_per_token": 1e6, "threads": 1, **host}

        def ceilings(self):
            return {"read_gb_s": 1.0, "multiply_gflop_s": 1.0}

        def plain_read(self, size):
            return lambda: size / 1e9

    monkeypatch.setattr(steps, "build_runner", lambda config, report: Idle(fake_kv(400, 16)))
    lines, result = measured("steps")
    assert [row["batch"] for row in result["decode"]] == [1, 8, 32]
    assert [row["tokens"] for row in result["prefill"]] == [128, 512, 2048]
    assert [(round(row["host_us"]), round(row["sample_us"])) for row in result["decode"]] == [
        (1000 * rows, 2000 * rows) for rows in (1, 8, 32)
    ]
    for row in result["decode"]:
        assert row["read_ms"] == 1
        assert row["percent_of_read"] == pytest.approx(100 * row["read_ms"] / row["ms"])
    assert len(lines) == 7


def test_serve_counts_every_token_through_a_server_a_core_and_a_client_of_their_own(monkeypatch):
    monkeypatch.setattr(serving, "CASES", ((1, 0), (4, 100)))
    monkeypatch.setattr(serving, "TOKENS", 60)
    lines, result = measured("serve")
    assert [(row["streams"], row["coalesce_ms"]) for row in result["rows"]] == [(1, 0), (4, 100)]
    assert len(lines) == 2
    for row in result["rows"]:
        assert 0 < row["tokens_per_s"] <= row["asked_per_s"] * 1.1
        assert 1 <= row["tokens_per_frame"] <= 60
        assert 0 < row["cpu_us_per_token"] <= row["cpu_us_per_frame"]
    assert result["rows"][1]["tokens_per_frame"] > 2


def test_the_command_line_names_the_scenarios(engines, capsys):
    assert cli.run(["bench", "everything"]) == 2
    assert "'steps', 'startup', 'scheduler', 'prefix', 'speculation', 'guided', 'serve'" in capsys.readouterr().err


def test_startup_compares_cold_and_warm_starts_of_every_depth(monkeypatch):
    started: list[tuple[str, str]] = []

    def start(config: EngineConfig, cache: str) -> dict[str, float]:
        started.append((config.model, cache))
        warm = started.count(started[-1]) == 2
        return {"first_token": 1.0} | ({} if warm else dict.fromkeys(("trace", "split", "compile"), 2.0))

    monkeypatch.setattr(startup, "_start", start)
    monkeypatch.setattr(startup, "model_folder", lambda config, report: "there")
    _, result = measured("startup")
    assert len(set(started)) == 5
    assert len(started) == 10
    assert result["named"]["cold"]["compile"] == 2.0
    assert "compile" not in result["depths"]["32"]["warm"]
    assert result["ratio_32_to_8"] == 1.0
