import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from compiled.step import LoadError, StepResult
from streamengine.config import EngineConfig
from streamengine.core import MAX_FAILED_STEPS, run_core
from streamengine.errors import StartupError
from streamengine.guided.grammar import Grammar
from streamengine.link import (
    Abort,
    AskStatistics,
    Configure,
    CoreLink,
    Deltas,
    Failed,
    FromCore,
    FrontLink,
    LinkBroken,
    LinkClosed,
    Progress,
    Ready,
    Statistics,
    Stop,
    Submit,
    ToCore,
    link_pair,
)
from streamengine.request import Delta, Finish, Request
from streamengine.scheduler import Scheduler
from tests.fakes import GREEDY, FakeHandle, FakeRunner, byte_tokenizer_json, fake_kv, fake_model, oracle

WAIT_S = 20.0
ROOT = Path(__file__).parents[2]
LENGTH = Finish("length", "max_tokens")


class Front:
    """The engine's end, blocking, with a deadline on everything."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(WAIT_S)
        self._sock = sock
        self._file = sock.makefile("rwb")
        self._inbox: list[FromCore] = []

    def send(self, *messages: ToCore) -> None:
        body = msgspec.msgpack.encode(messages)
        self._file.write(struct.pack("!I", len(body)) + body)
        self._file.flush()

    def receive(self) -> FromCore | None:
        """The next message; None at the end."""
        if not self._inbox:
            prefix = self._file.read(4)
            if len(prefix) < 4:
                return None
            self._inbox = msgspec.msgpack.decode(self._file.read(*struct.unpack("!I", prefix)), type=list[FromCore])
        return self._inbox.pop(0)

    def deltas(self) -> tuple[Delta, ...]:
        message = self.receive()
        assert isinstance(message, Deltas), message
        return message.deltas

    def finish(self, *ids: int) -> dict[int, tuple[list[int], Finish]]:
        """Tokens and ends of these requests, with those of any others that are seen meanwhile."""
        tokens: dict[int, list[int]] = {}
        ends: dict[int, Finish] = {}
        while not ends.keys() >= set(ids):
            for delta in self.deltas():
                tokens.setdefault(delta.request, []).extend(delta.tokens)
                if delta.finish is not None:
                    assert delta.request not in ends
                    ends[delta.request] = delta.finish
        return {id: (tokens[id], end) for id, end in ends.items()}

    def statistics(self) -> dict[str, float]:
        self.send(AskStatistics())
        message = self.receive()
        assert isinstance(message, Statistics), message
        return message.values

    def close(self) -> None:
        self._file.close()
        self._sock.close()


@contextmanager
def unready_core(
    build: Callable[[], FakeRunner], config: EngineConfig | None = None, raises: type[Exception] | None = None
) -> Iterator[Front]:
    """A core in a thread, configured. Leaving the block closes the link; the core must return by itself."""
    caught: list[Exception] = []

    def run() -> None:
        try:
            run_core(CoreLink(core_socket), lambda config, progress: build())
        except Exception as error:
            caught.append(error)

    front_socket, core_socket = link_pair()
    front = Front(front_socket)
    worker = threading.Thread(target=run)
    worker.start()
    try:
        front.send(Configure(config or EngineConfig(max_num_seqs=8)))
        yield front
    finally:
        front.close()
        worker.join(WAIT_S)
        assert not worker.is_alive()
    assert [type(error) for error in caught] == ([raises] if raises else []), caught


@contextmanager
def core(
    runner: FakeRunner, config: EngineConfig | None = None, raises: type[Exception] | None = None
) -> Iterator[Front]:
    with unready_core(lambda: runner, config, raises) as front:
        assert isinstance(front.receive(), Progress)
        assert isinstance(front.receive(), Ready)
        yield front
    assert runner.closed


def submit(id: int, prompt: bytes = b"hello", max_tokens: int = 6) -> Submit:
    return Submit(Request(id=id, prompt=tuple(prompt), max_tokens=max_tokens, sampling=GREEDY))


both_depths = pytest.mark.parametrize("depth", [1, 2])


# start


def test_a_core_warms_up_and_then_says_what_it_serves():
    runner = FakeRunner()
    with unready_core(lambda: runner) as front:
        assert front.receive() == Progress("warm-up")
        assert front.receive() == Ready(model=runner.model, kv=runner.kv, ledger=runner.statistics())
        assert runner.warmups == 1


def test_a_builder_reports_its_progress_before_that():
    front_socket, core_socket = link_pair()

    def build(config: EngineConfig, progress: Callable[[Progress], None]) -> FakeRunner:
        progress(Progress(f"load {config.model}", 1, 2))
        return FakeRunner()

    front = Front(front_socket)
    front.send(Configure(EngineConfig(model="tiny")), Stop())
    run_core(CoreLink(core_socket), build)
    assert [type(message) for message in iter(front.receive, None)] == [Progress, Progress, Ready]
    front.close()


def test_a_shorter_context_than_the_models_is_told_and_held():
    with unready_core(FakeRunner, EngineConfig(max_model_len=32, max_num_seqs=8)) as front:
        front.receive()
        ready = front.receive()
        assert isinstance(ready, Ready) and ready.model.max_model_len == 32
        front.send(submit(1, max_tokens=28))
        assert front.finish(1)[1][1].cause == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LoadError("no config.json in /models/x"), "no config.json in /models/x"),
        (StartupError("kv_pages is too small", param="kv_pages"), "kv_pages is too small"),
        (RuntimeError("out of\nmemory"), "RuntimeError: out of memory"),
    ],
)
def test_a_runner_that_cannot_be_built_is_told_in_one_line_and_ends_the_core(error, message):
    def build() -> FakeRunner:
        raise error

    with unready_core(build) as front:
        assert front.receive() == Failed("startup", message)
        assert front.receive() is None


def test_a_config_that_cannot_be_read_is_told_and_ends_the_core():
    front, back = link_pair()
    body = msgspec.msgpack.encode([{"type": "configure", "config": {"kv_pages": 1.5}}])
    with front:
        front.sendall(len(body).to_bytes(4) + body)
        with pytest.raises(LinkBroken, match="kv_pages"):
            run_core(CoreLink(back), lambda config, report: FakeRunner())
        assert b"kv_pages" in front.recv(4096)


def test_a_warm_up_that_raises_is_a_failed_start_and_closes_the_runner():
    class Cold(FakeRunner):
        def warmup(self) -> None:
            raise RuntimeError("no such shape")

    runner = Cold()
    with unready_core(lambda: runner) as front:
        front.receive()
        assert front.receive() == Failed("startup", "RuntimeError: no such shape")
    assert runner.closed


def test_an_engine_that_is_gone_during_the_start_ends_the_core_quietly():
    built = threading.Event()

    def build() -> FakeRunner:
        assert built.wait(WAIT_S)
        return runner

    runner = FakeRunner()
    with unready_core(build) as front:
        front.close()
        built.set()
    assert runner.closed and runner.steps == []


# answers


@both_depths
def test_answers_do_not_depend_on_who_else_is_served(depth):
    with core(FakeRunner(depth=depth)) as front:
        prompts = {id: bytes([id]) * id for id in range(1, 7)}
        front.send(*(submit(id, prompt, 5 + id) for id, prompt in prompts.items()))
        answers = front.finish(*prompts)
        for id, prompt in prompts.items():
            assert answers[id] == (oracle(prompt, 5 + id), LENGTH)


def test_everything_that_a_step_did_is_one_message():
    with core(FakeRunner()) as front:
        front.send(submit(1, max_tokens=2), submit(2, max_tokens=3), submit(3, max_tokens=1))
        assert [[delta.request for delta in front.deltas()] for _ in range(3)] == [[1, 2, 3], [1, 2], [2]]


def test_requests_that_arrive_while_a_step_runs_join_the_next_one():
    runner = FakeRunner()
    with core(runner) as front:
        runner.hold()
        front.send(submit(1))
        assert runner.holding.wait(WAIT_S)
        front.send(submit(2))
        runner.release()
        front.finish(1, 2)
        assert [[row.request for row in step.rows] for step in runner.steps[:2]] == [[1], [1, 2]]


def test_with_depth_two_the_next_step_is_launched_before_the_first_one_is_awaited():
    runner = FakeRunner(depth=2)
    with core(runner) as front:
        runner.hold()
        front.send(submit(1))
        assert runner.holding.wait(WAIT_S)
        assert [step.rows[0].pending for step in runner.steps] == [False, True]
        runner.release()
        assert front.finish(1)[1] == (oracle(b"hello", 6), LENGTH)


# options


def test_a_prefix_is_found_unless_that_is_switched_off():
    for on in (True, False):
        with core(FakeRunner(), EngineConfig(max_num_seqs=8, enable_prefix_caching=on)) as front:
            for id in (1, 2):
                front.send(submit(id, b"the same long prompt"))
                front.finish(id)
            assert front.statistics().get("prefix_hits", 0) == (16 if on else 0)


def test_the_threshold_for_long_prompts_is_applied():
    runner = FakeRunner()
    with core(runner, EngineConfig(max_num_seqs=8, long_prefill_token_threshold=6)) as front:
        front.send(submit(1, b"x" * 20, 1))
        front.finish(1)
    assert [len(row.tokens) for step in runner.steps for row in step.rows] == [6, 6, 6, 2]


@both_depths
def test_debug_poisons_freed_pages_between_steps_and_checks_the_books(depth):
    class Recorder(FakeRunner):
        def poison(self, pages):
            poisoned.update(pages)
            super().poison(pages)

    poisoned: set[int] = set()
    runner = Recorder(fake_kv(pages=9), depth=depth)
    with core(runner, EngineConfig(max_num_seqs=8, debug=True, enable_prefix_caching=False)) as front:
        front.send(*(submit(id, bytes([id]) * 5, 9) for id in range(1, 7)))
        answers = front.finish(*range(1, 7))
    assert all(answers[id] == (oracle(bytes([id]) * 5, 9), LENGTH) for id in range(1, 7))
    assert len(poisoned) >= 4


def test_a_trace_that_cannot_be_written_is_a_failed_start(tmp_path):
    with unready_core(FakeRunner, EngineConfig(max_num_seqs=8, trace=str(tmp_path / "no" / "trace"))) as front:
        front.receive()
        message = front.receive()
        assert isinstance(message, Failed) and "the trace cannot be written" in message.message


def test_the_steps_are_counted_in_histograms():
    with core(FakeRunner()) as front:
        front.send(submit(1, max_tokens=3))
        front.finish(1)
        statistics = front.statistics()
        assert statistics["step_s_count"] == statistics["step_rows_count"] == 3
        assert statistics["step_tokens_sum"] == 5 + 2


# one request at fault


def test_a_request_that_can_never_fit_is_refused_and_the_others_are_served():
    with core(FakeRunner(fake_kv(pages=4))) as front:
        front.send(submit(1, max_tokens=3), submit(2, b"x" * 13), submit(3, max_tokens=3))
        answers = front.finish(1, 2, 3)
        assert answers[2] == (
            [],
            Finish(
                "error",
                "context_length_exceeded",
                "a prompt of 13 tokens and max_tokens 6 need 5 KV pages of 4 tokens; there are 3",
                "max_tokens",
            ),
        )
        assert answers[1] == answers[3] == (oracle(b"hello", 3), LENGTH)


def test_each_answer_of_a_refused_request_is_told_its_end():
    with core(FakeRunner(), EngineConfig(max_num_seqs=2)) as front:
        front.send(Submit(Request(id=1, prompt=(1, 2), max_tokens=3, sampling=GREEDY, n=3)))
        deltas = front.deltas()
        assert [(delta.index, delta.finish and delta.finish.cause) for delta in deltas] == [
            (index, "invalid_request") for index in range(3)
        ]


def test_one_request_more_than_the_queue_holds_is_refused_as_overloaded():
    config = EngineConfig(max_num_seqs=1, max_queue=1)
    with core(FakeRunner(), config) as front:
        front.send(submit(1), submit(2), submit(3))
        answers = front.finish(1, 2, 3)
        assert [answers[id][1].cause for id in (1, 2, 3)] == ["max_tokens", "max_tokens", "overloaded"]


# aborts


@both_depths
def test_an_abort_during_a_step_takes_effect_after_it_and_frees_the_pages(depth):
    runner = FakeRunner(depth=depth)
    with core(runner) as front:
        runner.hold()
        front.send(submit(1, max_tokens=100), submit(2))
        assert runner.holding.wait(WAIT_S)
        front.send(Abort(1, "client"))
        runner.release()
        answers = front.finish(1, 2)
        assert answers[1] == (oracle(b"hello", 1), Finish("cancelled", "client"))
        assert answers[2] == (oracle(b"hello", 6), LENGTH)
        assert front.statistics()["kv_pages_used"] == 0


def test_an_abort_in_the_same_frame_as_its_submit_ends_the_request_before_any_step():
    runner = FakeRunner()
    with core(runner) as front:
        front.send(submit(1), Abort(1, "client"))
        assert front.finish(1)[1] == ([], Finish("cancelled", "client"))
        assert runner.steps == []


def test_an_abort_of_one_answer_that_has_not_begun_leaves_all_of_them(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    wanted: dict[str, Any] = {"prompt": (1, 2), "max_tokens": 9, "sampling": GREEDY, "n": 2}
    grammar = Grammar(kind="regex", text="[a-c]{3}!")
    with core(FakeRunner(fake_kv(pages=65), model=fake_model(64, str(tmp_path)))) as front:
        requests = [Request(id=1, grammar=grammar, **wanted), Request(id=2, **wanted)]
        front.send(*map(Submit, requests), *(Abort(request.id, "stop", 1) for request in requests))
        ends: dict[tuple[int, int], Finish] = {}
        while len(ends) < 4:
            ends |= {(delta.request, delta.index): delta.finish for delta in front.deltas() if delta.finish}
        assert {place: end.reason for place, end in ends.items()} == {
            (1, 0): "stop",
            (1, 1): "stop",
            (2, 0): "length",
            (2, 1): "length",
        }


def test_an_abort_of_an_unknown_or_ended_request_is_ignored():
    with core(FakeRunner()) as front:
        front.send(Abort(9, "client"), submit(1))
        front.finish(1)
        front.send(Abort(1, "client"))
        assert front.statistics()["finished_cancelled"] == 0


# faults


@both_depths
@pytest.mark.parametrize("at", ["submit", "wait"])
def test_a_step_that_raises_ends_its_requests_with_an_engine_error_and_the_core_goes_on(at, depth):
    runner = FakeRunner(depth=depth)
    with core(runner) as front:
        runner.fail(at=at)
        front.send(submit(1), submit(2))
        answers = front.finish(1, 2)
        assert {end for _, end in answers.values()} == {Finish("error", "engine_error", "RuntimeError: kernel panic")}
        front.send(submit(3))
        assert front.finish(3)[3] == (oracle(b"hello", 6), LENGTH)
        statistics = front.statistics()
        assert statistics["failed_steps"] == 1 and statistics["kv_pages_used"] == 0


def test_steps_that_fail_now_and_then_do_not_end_the_core():
    runner = FakeRunner()
    with core(runner) as front:
        for id in range(MAX_FAILED_STEPS + 1):
            runner.fail()
            front.send(submit(2 * id))
            assert front.finish(2 * id)[2 * id][1].reason == "error"
            front.send(submit(2 * id + 1))
            assert front.finish(2 * id + 1)[2 * id + 1][1] == LENGTH


def test_steps_that_keep_failing_end_the_core():
    runner = FakeRunner()
    with core(runner) as front:
        runner.fail(times=MAX_FAILED_STEPS)
        for id in range(MAX_FAILED_STEPS):
            front.send(submit(id))
            front.finish(id)
        assert front.receive() == Failed("engine_error", "3 steps in a row failed")
        assert front.receive() is None


def test_a_bug_of_ours_is_told_to_the_engine_and_raised():
    class Confused(FakeRunner):
        def finish(self, handle: FakeHandle) -> StepResult:
            return StepResult(number=99, tokens=super().finish(handle).tokens, seconds=0.0)

    with core(Confused(), raises=AssertionError) as front:
        front.send(submit(1))
        assert front.receive() == Failed("engine_error", "AssertionError: step 1 was answered by 99")
        assert front.receive() is None


def test_the_books_are_checked_whenever_the_core_goes_idle(monkeypatch):
    def check(scheduler: Scheduler) -> None:
        if scheduler.has_work or scheduler.statistics()["steps"]:
            raise AssertionError("a page is lost")

    monkeypatch.setattr(Scheduler, "check", check)
    with core(FakeRunner(), raises=AssertionError) as front:
        front.send(submit(1, max_tokens=1))
        front.finish(1)
        assert front.receive() == Failed("engine_error", "AssertionError: a page is lost")


@pytest.mark.parametrize("left", [3, 10**9])
def test_an_idle_core_lets_its_runner_prepare_and_a_message_does_not_wait_for_all_of_it(left):
    began, done = threading.Event(), list[int]()

    class Preparing(FakeRunner):
        def capture_next(self) -> bool:
            began.set()
            done.append(len(done))
            return len(done) < left

    with core(Preparing()) as front:
        assert began.wait(WAIT_S)
        front.send(submit(1, b"hello", 3))
        assert front.finish(1)[1] == (oracle(b"hello", 3), LENGTH)
        assert front.statistics()["running"] == 0
    assert 0 < len(done) < 10**9


# the end


@both_depths
def test_stop_cancels_what_still_runs_and_ends_the_core(depth):
    runner = FakeRunner(depth=depth)
    with core(runner, EngineConfig(max_num_seqs=1)) as front:
        runner.hold()
        front.send(submit(1, max_tokens=100), submit(2))
        assert runner.holding.wait(WAIT_S)
        front.send(Stop())
        runner.release()
        answers = front.finish(1, 2)
        assert [end for _, end in answers.values()] == [Finish("cancelled", "shutdown")] * 2
        assert front.receive() is None


@both_depths
def test_an_engine_that_is_gone_ends_the_core_in_the_middle_of_an_answer(depth):
    runner = FakeRunner(depth=depth)
    with core(runner) as front:
        runner.hold()
        front.send(submit(1, max_tokens=100))
        assert runner.holding.wait(WAIT_S)
        front.close()
        runner.release()
    assert len(runner.steps) <= 2 * depth


def test_two_cores_live_in_one_process():
    with core(FakeRunner()) as one, core(FakeRunner(fake_kv(), fake_model(), 2)) as other:
        one.send(submit(1))
        other.send(submit(1))
        assert one.finish(1) == other.finish(1)


def test_a_core_in_a_thread_leaves_the_garbage_collector_of_its_process_alone():
    frozen = gc.get_freeze_count()
    with core(FakeRunner()):
        assert gc.get_freeze_count() == frozen


# a process of its own

CHILD = """
import gc, socket, sys
from streamengine.core import run_core
from streamengine.link import CoreLink
from tests.fakes import FakeRunner

class Runner(FakeRunner):
    def statistics(self):
        return {"frozen": gc.get_freeze_count(), "torch": int("torch" in sys.modules)}

run_core(CoreLink(socket.socket(fileno=int(sys.argv[1]))), lambda config, progress: Runner())
"""


@contextmanager
def child() -> Iterator[tuple[subprocess.Popen, socket.socket]]:
    front, core_socket = link_pair()
    with front, core_socket:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(core_socket.fileno())],
            pass_fds=[core_socket.fileno()],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"},
        )
        with process:
            core_socket.close()
            try:
                yield process, front
            finally:
                process.kill()


async def read_to_the_end(link: FrontLink) -> None:
    while True:
        await link.receive()


@pytest.mark.anyio
async def test_a_child_answers_without_torch_and_leaves_quietly_when_the_engine_closes():
    with child() as (process, sock), anyio.fail_after(WAIT_S):
        link = await FrontLink.open(sock)
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            link.post(Configure(EngineConfig()), submit(1))
            assert isinstance(await link.receive(), Progress)
            ready = await link.receive()
            assert isinstance(ready, Ready) and ready.ledger["frozen"] > 0 and not ready.ledger["torch"]
            answer: list[int] = []
            while len(answer) < 6:
                message = await link.receive()
                assert isinstance(message, Deltas)
                answer += message.deltas[0].tokens
            assert answer == oracle(b"hello", 6)
            await link.aclose()
        assert await anyio.to_thread.run_sync(process.wait) == 0


@pytest.mark.anyio
async def test_a_child_that_is_killed_is_seen_to_be_gone_at_once():
    with child() as (process, sock), anyio.fail_after(WAIT_S):
        link = await FrontLink.open(sock)
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            link.post(Configure(EngineConfig()), submit(1, max_tokens=200))
            while not isinstance(await link.receive(), Deltas):
                pass
            process.send_signal(signal.SIGKILL)
            with pytest.raises(LinkClosed):
                await read_to_the_end(link)
        await link.aclose()
