"""`/metrics` of a real server over a fake runner, and its totals when a core starts again."""

from typing import Any

import pytest
from anyio import run
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from streamengine.config import ServerConfig
from streamengine.errors import EngineFailure
from streamengine.histogram import SECONDS, Histogram
from streamengine.server.metrics import Metrics
from streamengine.server.service import Service
from tests.fakes import FakeRunner, fake_kv, fake_model
from tests.serving import engine_over, eventually, roomy_runner, serving


def parse(text):
    """``{name: value}`` of samples without labels, ``{(name, labels…): value}`` of those with any."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sorted(sample.labels.values())
            found[(sample.name, *labels) if labels else sample.name] = sample.value
    return found


@pytest.fixture
def served():
    with serving(engine_over(roomy_runner(), max_num_seqs=8, max_num_batched_tokens=64)) as served:
        yield served


def scrape(served):
    status, headers, body = served.get("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    return parse(body.decode())


def test_an_idle_server_has_every_metric_and_counts_nothing(served):
    metrics = scrape(served)
    assert metrics["streamengine_ready"] == 1
    assert metrics["streamengine_model_info", "FakeForCausalLM", "fake", "float32"] == 1
    for name in ("requests_running", "generation_tokens_total", "preemptions_total", "step_time_seconds_count"):
        assert metrics[f"streamengine_{name}"] == 0


def test_a_scrape_tells_what_requests_did(served):
    with served.connect() as client:
        for number in range(3):
            client.generate(f"r{number}", prompt="hello", max_tokens=10)
        for _ in range(3):
            client.until("done")
        client.generate("bad", prompt="")
        client.until("error")
        eventually(lambda: scrape(served)["streamengine_requests_running"] == 0)
        metrics = scrape(served)
    assert metrics["streamengine_connections"] == 1
    assert metrics["streamengine_requests_submitted_total"] == 3
    assert metrics["streamengine_requests_finished_total", "length"] == 3
    assert metrics["streamengine_requests_refused_total", "invalid_request"] == 1
    assert metrics["streamengine_generation_tokens_total"] == 30
    assert metrics["streamengine_prompt_tokens_total"] == 15
    assert metrics["streamengine_kv_cache_usage_ratio"] == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert metrics[f"streamengine_{name}_seconds_count"] == 3
        assert metrics[f"streamengine_{name}_seconds_bucket", "+Inf"] == 3
    assert metrics["streamengine_inter_token_latency_seconds_count"] == 27


def test_a_gateway_finds_queue_seats_cache_use_and_the_page_size_each_in_one_series():
    """The four that the Gateway API's inference extension asks of a model server."""
    runner = FakeRunner(kv=fake_kv(pages=4097, page_size=16), model=fake_model(60_000))
    with serving(engine_over(runner, max_num_seqs=1)) as served, served.connect() as client:
        for number in range(3):
            client.generate(f"r{number}", prompt="hello", max_tokens=50_000)
        eventually(lambda: scrape(served)["streamengine_requests_queued"] == 2)
        metrics = scrape(served)
    assert metrics["streamengine_requests_running"] == 1
    assert 0 < metrics["streamengine_kv_cache_usage_ratio"] <= 1
    assert metrics["streamengine_cache_config_info", "16", "4096"] == 1


def test_every_step_is_in_the_histograms(served):
    with served.connect() as client:
        client.generate(max_tokens=10)
        client.until("done")
    eventually(lambda: scrape(served)["streamengine_step_requests_count"] == 10)
    metrics = scrape(served)
    assert metrics["streamengine_step_time_seconds_count"] == 10
    assert metrics["streamengine_step_tokens_sum"] == len("hello") + 9
    assert metrics["streamengine_step_requests_bucket", "1.0"] == 10


def test_statistics_include_the_memory_ledger(served):
    status, _, values = served.get("/v1/stats")
    assert status == 200
    assert values["ledger"]["kv_bytes"] > 0


def test_a_compile_while_serving_is_in_metrics_and_statistics(served, monkeypatch):
    assert scrape(served)["streamengine_compilations_after_ready_total"] == 0
    monkeypatch.setattr(FakeRunner, "statistics", lambda runner: {"compilations_after_ready": 2.0})
    assert scrape(served)["streamengine_compilations_after_ready_total"] == 2
    _, _, values = served.get("/v1/stats")
    assert values["runner_compilations_after_ready"] == 2


class Restarted:
    """As much of an engine as metrics see; each number is one core's."""

    status = "ready"
    model = fake_model()
    kv = fake_kv()

    def __init__(self):
        self.cores = 0
        self.next(0)

    def next(self, generated):
        self.cores += 1
        self.epoch = f"core {self.cores}"
        self.values = {"generated_tokens": generated, "running": 2, "engine_submitted": 7}

    async def statistics(self):
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


@pytest.fixture
def engine():
    return Restarted()


def metrics_of(engine: Any) -> Metrics:
    service = Service(ServerConfig())
    service.open(engine)
    return Metrics(service)


@pytest.fixture
def metrics(engine):
    return metrics_of(engine)


def ask(metrics, accept=""):
    request = Request({"type": "http", "headers": [(b"accept", accept.encode())]})
    return run(metrics.answer, request)


def value(metrics, name):
    return parse(ask(metrics).body.decode())[f"streamengine_{name}"]


def test_counters_go_on_when_a_core_counts_from_zero_again(engine, metrics):
    seen = []
    for generated in (100, 40, 200):
        engine.next(generated)
        seen.append(value(metrics, "generation_tokens_total"))
    assert seen == [100, 140, 340]
    assert value(metrics, "requests_submitted_total") == 7, "the engine's own counter did not start again"


def test_histograms_go_on_as_well(engine, metrics):
    histogram = Histogram(SECONDS)
    histogram.observe(0.02)
    for _ in range(2):
        engine.next(0)
        engine.values |= histogram.statistics("step_s")
        value(metrics, "ready")
    samples = parse(ask(metrics).body.decode())
    assert samples["streamengine_step_time_seconds_count"] == 2
    assert samples["streamengine_step_time_seconds_sum"] == pytest.approx(0.04)
    assert samples["streamengine_step_time_seconds_bucket", "0.01"] == 0
    assert samples["streamengine_step_time_seconds_bucket", "0.025"] == 2


def test_a_counter_that_falls_within_one_core_stays_where_it_was(engine, metrics):
    engine.next(50)
    assert value(metrics, "generation_tokens_total") == 50
    engine.values = {"generated_tokens": 20}
    assert value(metrics, "generation_tokens_total") == 50


def test_without_a_core_totals_stay_and_nothing_runs(engine, metrics):
    engine.next(50)
    assert value(metrics, "requests_running") == 2
    engine.values = EngineFailure("the core died")
    assert value(metrics, "generation_tokens_total") == 50
    assert value(metrics, "requests_running") == 0


def test_a_server_that_still_starts_has_metrics_already():
    assert value(Metrics(Service(ServerConfig())), "ready") == 0
    assert value(metrics_of(Restarted()), "streams_kept") == 0


def test_an_error_in_here_is_one_failed_scrape(engine, metrics):
    engine.values = ValueError("our own bug")
    assert ask(metrics).status_code == 500
    engine.next(1)
    assert ask(metrics).status_code == 200


def test_a_client_that_asks_for_open_metrics_gets_them(metrics):
    answer = ask(metrics, "application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")


def test_two_servers_in_one_process_share_nothing(engine):
    other = Restarted()
    engine.next(5)
    first, second = metrics_of(engine), metrics_of(other)
    assert (value(first, "generation_tokens_total"), value(second, "generation_tokens_total")) == (5, 0)
