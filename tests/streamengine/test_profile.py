"""A profile is a document whose seconds add up, is taken of whatever runs, and takes nothing from anybody."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from compiled.step import Step
from compiled.timeline import Measure, MeasuredStep, PieceAbout, Place, Span, Window
from compiled.work import Work, constant
from streamengine import compose, scenarios
from streamengine.cli import run
from streamengine.config import EngineConfig
from streamengine.engine import Engine
from streamengine.errors import Conflict, EngineFailure, InvalidRequest, QueueTimeout, UnsupportedFeature
from streamengine.profile.record import Ceilings, Hardware, Profile, decode, encode
from streamengine.profile.summary import MAX_TEXT, Circumstances, summarise
from streamengine.sampling import SamplingParams
from tests.fakes import ByteTokenizer, FakeHandle, FakeRunner, fake_kv, fake_model, oracle
from tests.serving import Served, engine_over, eventually, roomy_runner, serving

PLACES = (Place("embed | layers.0: qkv", "piece", "k0"), Place("layers.0: attention", "attention"))
PIECE = PieceAbout(
    "k0",
    (PLACES[0].name,),
    Work(constant(1000), constant(50)),
    "graph",
    "code",
    {"cpp_fused_0": "void kernel()"},
    {"trace": 1.0, "lower": 2.0, "codegen": 3.0, "cxx": 4.0, "cxx_pieces": 1},
    True,
)


@dataclass(eq=False)
class MeasuredRunner(FakeRunner):
    """A fake that says of each step that its piece took 3 ms of it, and attention 1."""

    measure: Measure | None = None
    plain: list[float] = field(default_factory=list)
    measured: list[MeasuredStep] = field(default_factory=list)

    def submit(self, step: Step) -> FakeHandle:
        handle = super().submit(step)
        if self.measure is not None:
            tokens = sum(len(row.tokens) for row in step.rows)
            spans = (Span(0, 0.001, 0.003, 1000, 50), Span(1, 0.005, 0.001, 200, 300))
            if len(self.plain) < self.measure.plain:
                self.plain.append(0.009)
            elif len(self.measured) < self.measure.steps:
                bucket = 1 << (tokens - 1).bit_length()
                self.measured.append(MeasuredStep(step.number, len(step.rows), tokens, bucket, 0.01, spans))
        return handle

    def profile(self, measure: Measure) -> None:
        self.measure, self.plain, self.measured = measure, [], []

    def profiled(self, *, stop: bool = False) -> Window | None:
        measure = self.measure
        if measure is None or not (stop or len(self.measured) == measure.steps):
            return None
        self.measure = None
        return Window(PLACES, (PIECE,), tuple(self.plain), tuple(self.measured), "cpu", measure.trace)

    def ceilings(self) -> dict[str, float]:
        return {"read_gb_s": 0.001, "multiply_gflop_s": 1.0}


def measured_runner(**more: Any) -> MeasuredRunner:
    return MeasuredRunner(kv=fake_kv(pages=2049, page_size=16), **more)


def engine_of(runner: FakeRunner, **config: Any) -> Engine:
    engine = engine_over(runner, **config)(lambda progress: None)
    assert isinstance(engine, Engine)
    return engine


def circumstances(ceilings: Ceilings | None = None) -> Circumstances:
    return Circumstances(
        model=fake_model(),
        eager=False,
        scenario="decode",
        created="2026-01-01T00:00:00+00:00",
        hardware=Hardware(cpu="some", cores=2, threads=1),
        ceilings=ceilings,
        statistics={"weights_bytes": 8.0, "trace_seconds": 2.0, "step_seconds": 9.0, "steps": 3.0},
    )


def step(number: int, seconds: float, *spans: Span, tokens: int = 2) -> MeasuredStep:
    return MeasuredStep(number, 1, tokens, 1 << (tokens - 1).bit_length(), seconds, spans)


# the document


def test_every_second_of_every_step_is_in_the_document_once() -> None:
    window = Window(
        PLACES,
        (PIECE,),
        (),
        (
            step(1, 0.010, Span(0, 0.001, 0.004, 8, 3), Span(1, 0.006, 0.002, 1, 1)),
            step(2, 0.030, Span(0, 0.001, 0.010, 8, 3), Span(1, 0.012, 0.012, 1, 1)),
            step(3, 0.020, Span(0, 0.002, 0.007, 90, 50), Span(1, 0.010, 0.003, 1, 1), tokens=60),
        ),
        "cpu",
    )
    found = summarise(window, circumstances())
    assert [(call.name, call.tokens, call.calls) for call in found.calls] == [
        ("embed | layers.0: qkv", 2, 2),
        ("layers.0: attention", 2, 2),
        ("embed | layers.0: qkv", 64, 1),
        ("layers.0: attention", 64, 1),
    ]
    assert sum(call.total_s for call in found.calls) + found.host.seconds == pytest.approx(found.step_s.total)
    assert sum(call.share for call in found.calls) + found.host.share == pytest.approx(1)
    assert found.step_s.total == pytest.approx(0.06)
    assert (found.step_s.min, found.step_s.p50, found.step_s.max) == (0.010, 0.020, 0.030)
    assert (found.calls[0].bytes, found.calls[0].min_s, found.calls[2].flops) == (16, 0.004, 50)
    assert found.timeline is not None
    assert (found.timeline.step, [event.start_s for event in found.timeline.events]) == (3, [0.002, 0.010])
    assert [(bucket.at_most, bucket.steps) for bucket in found.tokens] == [(2, 2), (64, 1)]
    assert (found.ledger, found.startup) == ({"weights_bytes": 8.0}, {"trace": 2.0})
    assert decode(encode(found)) == found


def test_a_call_is_held_against_the_nearer_ceiling() -> None:
    spans = Span(0, 0.0, 0.004, 1_000_000, 1), Span(1, 0.005, 0.001, 1, 10_000_000)
    window = Window(PLACES, (), (), (step(1, 0.01, *spans),), "cpu")
    reading, computing = summarise(window, circumstances(Ceilings(read_gbps=1.0, product_gflops=100.0))).calls
    assert (reading.gbps, reading.of_ceiling) == (pytest.approx(0.25), pytest.approx(25.0))
    assert (computing.gflops, computing.of_ceiling) == (pytest.approx(10.0), pytest.approx(10.0))


def test_what_is_not_known_is_null_and_not_zero() -> None:
    half = step(1, 0.01, Span(0, 0.0, 0.004, 5, 5)), step(2, 0.01, Span(0, 0.0, 0.004))
    found = summarise(
        Window(PLACES, (PieceAbout("k0", ("embed",), missed="dtype: a → b"),), (), half, "cpu"), circumstances()
    )
    (call,), (piece,) = found.calls, found.pieces
    assert (call.bytes, call.flops, call.gbps, call.of_ceiling, found.overhead) == (None,) * 5
    assert (piece.bytes, piece.graph, piece.kernels) == (None, None, ())
    assert piece.compile is not None
    assert (piece.compile.cache, piece.compile.factor, piece.compile.cxx_s) == ("miss", "dtype: a → b", None)


def test_a_source_of_any_length_makes_a_document_of_bounded_size() -> None:
    long = PieceAbout("k0", ("embed",), graph="g" * (MAX_TEXT + 7), code="c" * MAX_TEXT)
    (piece,) = summarise(Window(PLACES, (long,), (), (step(1, 0.01),), "cpu"), circumstances()).pieces
    assert piece.graph is not None
    assert piece.graph.endswith("g\n… 7 more characters")
    assert piece.code == "c" * MAX_TEXT


# of a running engine

pytestmark = pytest.mark.anyio


async def test_eight_streams_that_run_while_a_profile_is_taken_lose_no_token() -> None:
    runner, texts, profiles = measured_runner(), dict[str, str](), list[Profile]()
    async with engine_of(runner) as engine:

        async def read(prompt: str) -> None:
            texts[prompt] = ""
            async for delta in engine.stream(prompt, sampling=SamplingParams(temperature=0, max_tokens=200)):
                texts[prompt] += delta.text

        async def profile() -> None:
            profiles.append(await engine.profile(40, plain_steps=30))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(profile)
                await anyio.wait_all_tasks_blocked()
                for number in range(8):
                    tasks.start_soon(read, f"prompt {number}")
    (found,) = profiles
    assert texts == {prompt: bytes(oracle(prompt.encode(), 200)).decode() for prompt in texts}
    assert (len(texts), found.steps, found.model, found.scenario) == (8, 40, "fake", "live")
    assert found.overhead is not None
    assert (found.overhead.off_s, found.overhead.on_s) == (0.009, 0.01)
    assert found.ceilings == Ceilings(read_gbps=0.001, product_gflops=1.0)
    assert found.calls[0].of_ceiling == pytest.approx(100 * 1000 / 0.001e9 / 0.003)


async def test_as_many_steps_are_told_as_came_in_time() -> None:
    async with engine_of(measured_runner()) as engine:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                found: list[Profile] = []

                async def profile() -> None:
                    found.append(await engine.profile(1000, timeout_s=1.5))

                tasks.start_soon(profile)
                await anyio.wait_all_tasks_blocked()
                await engine.generate("hello", sampling=SamplingParams(temperature=0, max_tokens=5))
    assert [profile.steps for profile in found] == [5]


async def test_without_any_step_a_profile_times_out_and_the_next_one_works() -> None:
    async with engine_of(measured_runner()) as engine:
        with anyio.fail_after(30):
            with pytest.raises(QueueTimeout, match="no step"):
                await engine.profile(1, timeout_s=0.05)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, "hello")
                assert (await engine.profile(2)).steps == 2


async def test_only_one_profile_is_taken_at_a_time_and_one_that_is_given_up_makes_room() -> None:
    runner = measured_runner()
    async with engine_of(runner) as engine:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.profile, 5)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(Conflict):
                    await engine.profile(5)
                tasks.cancel_scope.cancel()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, "hello")
                assert (await engine.profile(3)).steps == 3


async def test_a_runner_that_cannot_be_measured_says_so_and_goes_on() -> None:
    async with engine_of(roomy_runner()) as engine:
        with anyio.fail_after(30):
            with pytest.raises(UnsupportedFeature, match="FakeRunner cannot be profiled"):
                await engine.profile(5)
            answer = await engine.generate("hello", sampling=SamplingParams(temperature=0, max_tokens=5))
    assert answer.text == bytes(oracle(b"hello", 5)).decode()


async def test_a_profile_that_goes_wrong_is_one_answer_and_no_request_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = measured_runner()
    monkeypatch.setattr(runner, "profiled", lambda stop=False: 1 / 0)
    async with engine_of(runner) as engine:
        with anyio.fail_after(30):
            async with engine.stream("hello", sampling=SamplingParams(temperature=0, max_tokens=200)) as stream:
                with pytest.raises(EngineFailure, match="ZeroDivisionError"):
                    await engine.profile(2)
                assert (await stream.result()).text == bytes(oracle(b"hello", 200)).decode()
    assert "no profile" in caplog.text


@pytest.mark.parametrize("steps", [0, -1, 1001, True, "many"])
async def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    async with engine_of(measured_runner()) as engine:
        with anyio.fail_after(30), pytest.raises(InvalidRequest, match="steps must be"):
            await engine.profile(steps)
        with anyio.fail_after(30), pytest.raises(InvalidRequest, match="timeout_s must be"):
            await engine.profile(1, timeout_s=0)


@pytest.mark.parametrize(
    "how",
    [
        {"ceilings": "no"},
        {"ceilings": None},
        {"trace": b"trace.json"},
        {"trace": 3},
        {"trace": "\udcff.json"},
        {"trace": Path("\udcff.json")},
        {"timeout": 3},
    ],
)
async def test_what_the_core_could_not_read_is_refused_by_its_name_and_harms_no_stream(how: Any) -> None:
    (name,) = how
    async with engine_of(measured_runner()) as engine:
        with anyio.fail_after(30):
            async with engine.stream("hello", sampling=SamplingParams(temperature=0, max_tokens=200)) as stream:
                with pytest.raises(InvalidRequest, match=name) as caught:
                    await engine.profile(1, **how)
                assert caught.value.param == name
                assert (await stream.result()).text == bytes(oracle(b"hello", 200)).decode()


# over HTTP


def post(served: Served, body: Any, **headers: str) -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(served.url + "/v1/profile", data, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


def test_a_server_answers_with_the_document_of_the_next_steps() -> None:
    runner, answers = measured_runner(), list[tuple[int, Any]]()
    with serving(engine_over(runner)) as served, served.connect() as client:
        asker = threading.Thread(target=lambda: answers.append(post(served, {"steps": 20, "plain_steps": 2})))
        asker.start()
        eventually(lambda: runner.measure is not None)
        client.generate(max_tokens=100)
        client.until("done")
        asker.join(20)
    ((status, body),) = answers
    found = decode(body)
    assert (status, found.steps, found.scenario, found.ceilings) == (200, 20, "live", None)


def test_a_server_says_what_is_wrong_with_a_question() -> None:
    with serving(engine_over(measured_runner())) as served:
        status, error = post(served, {"steps": 0})
        assert (status, error["code"], error["param"]) == (400, "invalid_request", "steps")
        status, error = post(served, {"trace": "/etc/passwd"})
        assert (status, error["code"], error["param"]) == (400, "invalid_request", "trace")
        status, error = post(served, {"timeout_s": 0.05})
        assert (status, error["code"]) == (503, "queue_timeout")


def test_a_second_profile_is_a_conflict_and_whoever_leaves_ends_the_first() -> None:
    runner = measured_runner()
    with serving(engine_over(runner)) as served:
        leaver = threading.Thread(target=pytest.raises, args=(OSError, impatient, served))
        leaver.start()
        eventually(lambda: runner.measure is not None)
        status, error = post(served, {})
        assert (status, error["code"]) == (409, "conflict")
        leaver.join(20)
        eventually(lambda: runner.measure is None)
        assert post(served, {"timeout_s": 0.001})[0] == 503


def impatient(served: Served) -> None:
    """Asks, and goes after a second."""
    request = urllib.request.Request(served.url + "/v1/profile", b'{"timeout_s": 600}', method="POST")
    urllib.request.urlopen(request, timeout=1)


def test_profiles_are_for_admins_where_there_are_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[alice]\nkey = "sk-alice-1"\n[root]\nkey = "sk-root-01"\nadmin = true\n')
    with serving(engine_over(measured_runner()), api_key_file=str(file)) as served:
        assert post(served, {})[0] == 401
        assert post(served, {}, Authorization="Bearer sk-alice-1")[0] == 403
        assert post(served, {"timeout_s": 0.01}, Authorization="Bearer sk-root-01")[0] == 503


# on the command line


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> MeasuredRunner:
    """What every scenario runs on. It is fast: an answer of 4000 tokens outlasts a message to the core."""
    fake = MeasuredRunner(kv=fake_kv(pages=4097, page_size=16), model=fake_model(4200))

    @asynccontextmanager
    async def open_engine(config: EngineConfig) -> AsyncIterator[Engine]:
        async with Engine(config, engine_of(fake)._connect, lambda folder: ByteTokenizer()) as engine:
            yield engine

    monkeypatch.setattr(scenarios, "open_engine", open_engine)
    monkeypatch.setattr(compose, "model_folder", lambda config, report: "fake")
    return fake


def profiled(folder: Path, *arguments: str) -> Profile:
    assert run(["profile", *arguments, "--out", str(folder)]) == 0
    assert "<html" in (folder / "report.html").read_text()
    return decode((folder / "profile.json").read_bytes())


@pytest.mark.parametrize("scenario", ["decode", "startup"])
def test_a_decoding_window_has_a_token_of_each_request_in_every_step(
    runner: MeasuredRunner, tmp_path: Path, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = profiled(tmp_path, "--scenario", scenario, "--steps", "6", "--batch", "4", "--context", "30")
    assert (found.scenario, found.steps, found.trace) == (scenario, 6, "trace.json")
    assert found.model == "smollm2-135m"  # as it was asked for, wherever the checkpoint is
    assert [(bucket.at_most, bucket.steps) for bucket in found.tokens] == [(4, 6)]
    assert [(bucket.at_most, bucket.steps) for bucket in found.rows] == [(4, 6)]
    assert found.overhead is not None
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


def test_a_prefill_window_is_full_of_prompts(runner: MeasuredRunner, tmp_path: Path) -> None:
    found = profiled(tmp_path, "--scenario", "prefill", "--steps", "6", "--batch", "4", "--context", "100")
    assert min(bucket.at_most for bucket in found.tokens) > 64
    assert all(row.start == 0 or len(row.tokens) > 1 for step in runner.steps for row in step.rows)


def test_a_mixed_window_has_prompts_beside_answers(runner: MeasuredRunner, tmp_path: Path) -> None:
    profiled(tmp_path, "--scenario", "mixed", "--steps", "6", "--batch", "4", "--context", "100")
    lengths = [{len(row.tokens) > 1 for row in step.rows} for step in runner.steps]
    assert {True, False} in lengths


def test_prompts_of_a_prefix_window_find_their_beginning_in_the_cache(runner: MeasuredRunner, tmp_path: Path) -> None:
    profiled(tmp_path, "--scenario", "prefix", "--steps", "6", "--batch", "4", "--context", "64")
    assert {row.start for step in runner.steps[1:] for row in step.rows} == {64}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "greater than or equal to 1"),
        (["--scenario", "mixed", "--batch", "1"], "mixed needs two requests at once"),
        (["--batch", "99"], "batch is 99, and max_num_seqs 64"),
        (["--context", "4150"], "prompt and answer take 4240 tokens, the model 4200"),
        (["--scenario", "other"], "other"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_with_its_numbers(
    runner: MeasuredRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert run(["profile", *arguments, "--out", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_requests_that_do_not_fit_the_pool_are_refused_before_they_wait_for_each_other(
    runner: MeasuredRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.kv = fake_kv(pages=9, page_size=16)
    assert run(["profile", "--batch", "8", "--context", "30", "--steps", "6", "--out", str(tmp_path)]) == 2
    assert "8 requests of 68 tokens need 40 KV pages, not 8" in capsys.readouterr().err
