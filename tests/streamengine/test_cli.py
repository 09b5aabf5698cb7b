"""The command line over an engine whose runner is a fake: what is asked, what is shown, how it ends."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal
from msgspec import structs
from websockets.sync.client import connect

from compiled.step import LoadError, Runner
from streamengine import chat, cli, compose
from streamengine.config import EngineConfig, TransferConfig
from streamengine.engine import Engine
from streamengine.link import Progress
from streamengine.options import ENGINE, SAMPLING, SERVER, TRANSFER, Group
from tests.fakes import BOS, ByteTokenizer, FakeRunner, fake_kv, fake_model, script
from tests.serving import Client
from tests.streamengine.guided.drawn import runner_in

ROOT = Path(__file__).resolve().parents[2]

PHASES = ["loading weights", "compiling", "warm-up"]
"""Start-up as the fake runner and then the core report it."""


def asked(*lines: str) -> tuple[int, ...]:
    """The ids of a conversation up to where the assistant speaks."""
    return (BOS, *"\n".join([*lines, "assistant: "]).encode())


REPLIES = script(
    {
        asked("user: hi", "assistant: Hello – there.", "user: more"): "More of it.",
        asked("user: hi"): "Hello – there.",
        asked("user: more"): "More of what?",
        asked("system: Be brief.", "user: hi"): "Hi.",
        "once": " upon a time",
    }
)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """Every engine that the command line opens runs on this, in a thread."""
    runner = FakeRunner(answer=REPLIES)
    use(runner, monkeypatch.setattr)
    return runner


def use(runner: FakeRunner, setattr: Callable[[object, str, object], None] = setattr) -> None:
    real = compose.open_engine

    def build_runner(config: EngineConfig, report: Callable[[Progress], None]) -> Runner:
        if config.model == "nonesuch":
            raise LoadError("model 'nonesuch' is not installed;\nget it with: nothing")
        for phase in PHASES[:2]:
            for done in range(3):
                report(Progress(phase, done, 2))
        return runner

    def open_engine(
        config: EngineConfig, *, restart: bool = False, progress: Callable[[Progress], None] | None = None
    ) -> AbstractAsyncContextManager[Engine]:
        return real(config, process=False, restart=restart, progress=progress)

    setattr(compose, "build_runner", build_runner)
    setattr(compose, "load_tokenizer", lambda folder: ByteTokenizer())
    setattr(compose, "open_engine", open_engine)


def test_serve_says_at_once_that_its_core_is_in_no_process_with_others(capsys):
    assert cli.run(["serve", "--port", "0", "--listen", "unix:/nowhere", "--kv-transport", "in_process"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: kv_transport in_process is for cores that are threads of one process")


def test_generate_streams_the_answer_to_the_prompt_in_its_chat_template(runner, capsys):
    assert cli.run(["generate", "--prompt", "hi"]) == 0
    assert capsys.readouterr().out == "Hello – there.\n"


def test_generate_raw_continues_the_prompt_without_a_template(runner, capsys):
    assert cli.run(["generate", "--prompt", "once", "--raw"]) == 0
    assert capsys.readouterr().out == " upon a time\n"


def test_generate_json_prints_one_object_with_text_ids_reason_usage_and_timing(runner, capsys):
    assert cli.run(["generate", "--prompt", "once", "--raw", "--max-tokens", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == " upon"
    assert bytes(answer["token_ids"]) == b" upon"
    assert answer["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 5)
    assert answer["timing"]["total_ms"] > 0


@pytest.fixture
def guided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a model that can be guided; it holds ``schema.json``."""
    use(runner_in(tmp_path), monkeypatch.setattr)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "answers"),
    [
        (["--regex", "[ab]c"], "[ab]c"),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
        (["--regex", "[a-z]+!", "--max-tokens", "5", "--close-document"], "[a-z]{1,4}!"),
    ],
)
def test_generate_keeps_to_a_pattern_or_a_choice(guided, capsys, options, answers):
    assert cli.run(["generate", "--prompt", "hi", "--raw", *options]) == 0
    assert re.fullmatch(answers, capsys.readouterr().out.removesuffix("\n"))


def test_generate_keeps_to_a_schema(guided, capsys):
    assert cli.run(["generate", "--prompt", "hi", "--raw", "--schema", str(guided / "schema.json")]) == 0
    assert json.loads(capsys.readouterr().out) in ({"n": 1}, {"n": 2})


def test_generate_prints_each_value_of_an_answer(guided, capsys):
    ask = ["generate", "--prompt", "hi", "--raw", "--values"]
    assert cli.run([*ask, "--schema", str(guided / "schema.json")]) == 0
    inner, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert whole == {"path": "", "value": {"n": inner["value"]}}
    assert inner["path"] == "/n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--regex", "a", "--choice", "b"], "give one of"),
        (["--schema", "nowhere.json"], "nowhere.json"),
        (["--regex", "("], "regex parse error"),
        (["--close-document"], "needs a response_format"),
        (["--values"], "--values needs --schema"),
    ],
)
def test_a_format_that_cannot_be_asked_for_is_one_line(guided, capsys, options, complaint):
    assert cli.run(["generate", "--prompt", "hi", *options]) in (1, 2)
    assert complaint in capsys.readouterr().err


def test_stop_may_be_repeated_and_is_not_part_of_the_answer(runner, capsys):
    assert cli.run(["generate", "--prompt", "once", "--raw", "--stop", "zzz", "--stop", " a t", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"], answer["stop_sequence"]) == (" upon", "stop", " a t")


def test_generate_prints_each_of_several_answers_and_says_which_on_stderr(runner, capsys):
    assert cli.run(["generate", "--prompt", "once", "--raw", "--n", "2", "--max-tokens", "5"]) == 0
    said = capsys.readouterr()
    assert said.out == " upon\n upon\n"
    assert said.err.splitlines()[-2:] == ["answer 1 of 2 (length):", "answer 2 of 2 (length):"]


def test_generate_json_holds_every_answer_in_choices(runner, capsys):
    assert cli.run(["generate", "--prompt", "once", "--raw", "--n", "2", "--max-tokens", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [choice["text"] for choice in answer["choices"]] == [" upon", " upon"]
    assert answer["usage"]["completion_tokens"] == 10


def test_log_probabilities_are_a_line_for_each_token_on_stderr(runner, capsys):
    arguments = ["generate", "--prompt", "once", "--raw", "--max-tokens", "3", "--logprobs", "1"]
    assert cli.run(arguments) == 0
    said = capsys.readouterr()
    assert said.out == " up\n"
    lines = said.err.splitlines()[-3:]
    assert [line.split(maxsplit=1)[1][:3] for line in lines] == ["' '", "'u'", "'p'"]
    assert all(len(line.split("  ")) >= 2 for line in lines)


def test_every_way_to_draw_is_an_option(runner, capsys):
    options = ["--logit-bias", "5=-1", "--logit-bias", "6=2.5", "--bad-word", "no", "--allowed-token-id", "32"]
    options += ["--typical-p", "0.9", "--repetition-penalty", "1.1", "--min-tokens", "2", "--priority", "3"]
    assert cli.run(["generate", "--prompt", "once", "--raw", "--max-tokens", "3", *options]) == 0
    assert runner.steps[0].rows[0].sampling.logit_bias == ((5, -1.0), (6, 2.5))


def test_start_up_is_one_line_per_phase_where_stderr_is_no_terminal(runner, capsys):
    assert cli.run(["generate", "--prompt", "hi"]) == 0
    assert capsys.readouterr().err.splitlines() == PHASES


def test_start_up_is_bars_on_a_terminal_and_they_are_gone_when_the_answer_comes(runner, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.run(["generate", "--prompt", "hi"]) == 0
    shown = terminal.getvalue()
    assert all(phase in shown for phase in PHASES)
    erase_line = "\x1b[2K"
    assert shown.rstrip().endswith(erase_line)
    assert capsys.readouterr().out == "Hello – there.\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--bogus"], "--bogus"),
        (["generate", "--prompt", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "temperature"),
        (["generate", "--prompt", "x", "--top-p", "0"], "top_p"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "--prompt", "x", "--stop", ""], "stop"),
        (["generate", "--prompt", "x", "--logit-bias", "5"], "logit_bias"),
        (["generate", "--prompt", "x", "--logit-bias", "a=1"], "logit_bias"),
        (["generate", "--prompt", "x", "--n", "17"], "max_n"),
        (["generate", "--prompt", "x", "--beam-width", "2", "--top-k", "3"], "top_k"),
        (["generate", "--prompt", "x", "--target-itl-ms", "nan"], "target_itl_ms"),
        (["generate", "--prompt", "x", "--prefix-quota", "0"], "prefix_quota"),
        (["generate", "--prompt", "x", "--trace-text"], "trace"),
        (["generate", "--prompt", "x", "--dtype", "float16"], "--dtype"),
        (["generate", "--prompt", "x", "--kv-pages", "1"], "kv_pages"),
        (["generate", "--prompt", "x" * 500], "256"),
        (["generate", "--raw", "--prompt", ""], "prompt"),
        (["generate", "--prompt", "x", "--model", "nonesuch"], "nonesuch"),
        (["chat", "--model", ""], "model"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "--drain-s", "-1"], "drain_s"),
        (["serve", "--role", "prefill"], "listen"),
        (["serve", "--role", "decode", "--peer", "somewhere"], "somewhere"),
        (["serve", "--prefill-threshold", "9"], "prefill_threshold"),
        (["serve", "--drain-s", "inf"], "drain_s"),
        (["serve", "--heartbeat-s", "nan"], "heartbeat_s"),
        (["serve", "--host", "x" * 64], "host"),
        (["generate", "--prompt", "x", "--kv-pages", "9" * 30], "kv_pages"),
        (["sing"], "sing"),
    ],
)
def test_what_a_person_got_wrong_is_one_line_that_names_it_and_status_2(runner, capsys, arguments, names):
    assert cli.run(arguments) == 2
    said = capsys.readouterr()
    complaints = [line for line in said.err.splitlines() if line not in PHASES]
    assert said.out == ""
    assert len(complaints) == 1
    assert complaints[0].startswith("error: ")
    assert names in complaints[0]


def test_an_engine_that_fails_is_status_1_and_one_line(runner, capsys):
    runner.fail(times=10)
    assert cli.run(["generate", "--prompt", "hi"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("group", [ENGINE, SAMPLING, SERVER, TRANSFER], ids=lambda group: group.panel)
def test_every_field_of_a_value_is_an_option(group: Group):
    fields = structs.fields(group.value)
    nested = {field.name for field in fields if field.type == TransferConfig | None}
    assert list(group.help) == [field.name for field in fields if field.name not in nested]


def test_an_option_can_be_set_in_the_environment_and_the_argument_wins(runner, capsys, monkeypatch):
    monkeypatch.setenv("STREAMENGINE_MODEL", "nonesuch")
    assert cli.run(["generate", "--prompt", "hi"]) == 2
    assert cli.run(["generate", "--prompt", "hi", "--model", "fake"]) == 0


@pytest.mark.parametrize(("given", "on"), [([], True), (["--no-enable-prefix-caching"], False)])
def test_what_is_on_by_default_is_turned_off_by_its_name_with_no(runner, monkeypatch, given, on):
    seen = []
    monkeypatch.setattr(compose, "build_runner", lambda config, report: seen.append(config) or runner)
    assert cli.run(["generate", "--prompt", "hi", *given]) == 0
    assert [config.enable_prefix_caching for config in seen] == [on]


def test_chat_remembers_until_it_is_reset(runner, capsys, monkeypatch):
    talk(monkeypatch, "hi", "more", "", "/reset", "more", "/exit", "hi")
    assert cli.run(["chat"]) == 0
    assert capsys.readouterr().out == "Hello – there.\nMore of it.\nMore of what?\n"


def test_chat_puts_the_system_message_before_the_conversation(runner, capsys, monkeypatch):
    talk(monkeypatch, "hi", "/reset", "hi")
    assert cli.run(["chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Hi.\nHi.\n"


def test_chat_goes_on_after_a_question_that_was_refused(runner, capsys, monkeypatch):
    talk(monkeypatch, "x" * 500, "hi")
    assert cli.run(["chat"]) == 0
    said = capsys.readouterr()
    assert said.out == "Hello – there.\n"
    assert said.err.splitlines()[-1].startswith("error: ")


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Type these, then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_doctor_reports_versions_cpu_compiler_and_a_default_start(capsys, monkeypatch):
    start = {"device": "cpu", "memory_available_bytes": 3 * 2**30, "default_model_hint": ""}
    monkeypatch.setattr(compose, "describe_machine", lambda: start)
    assert cli.run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["default start"] == start
    assert report["versions"]["streamengine"]
    assert set(report["compiler"]) >= {"g++"}
    assert cli.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "3,072 MiB" in shown
    assert "default_model_hint" not in shown


def test_without_a_command_there_is_help_and_no_complaint(capsys):
    assert cli.run([]) == 2
    said = capsys.readouterr()
    assert "generate" in said.out
    assert said.err == ""


def test_version_and_help_need_no_torch_and_no_engine():
    program = (
        "import sys; from streamengine.cli import run; "
        "status = run(['--version']) or run(['--help']) or run(['serve', '--help']); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), status)"
    )
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert answer.stdout.startswith("streamengine ")
    assert "--allow-origin" in answer.stdout
    assert answer.stdout.endswith("[] 0\n")
    assert answer.stderr == ""


def test_python_m_streamengine_is_the_command_line():
    command = [sys.executable, "-m", "streamengine", "serve", "--port", "none"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: Invalid value for '--port'")


# A process of its own, for what happens to a process.

PROGRAM = """
import sys
from streamengine import cli
from tests.fakes import FakeRunner, fake_kv, fake_model
from tests.streamengine.test_cli import use

runner = FakeRunner(kv=fake_kv(4097, 16), model=fake_model(60000), answer=lambda context, sampling: ord("a"))
use(runner)
cli.main()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}", "PYTHONUNBUFFERED": "1"}


def start(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # Whoever runs the tests in the background may have made us, and so it, ignore Ctrl-C.
        ["env", "--default-signal=INT", sys.executable, "-c", PROGRAM, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


def test_ctrl_c_ends_generate_quietly_with_130():
    with start("generate", "--prompt", "hi") as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"aaa"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert set(out) <= set(b"a\n")
    assert b"Traceback" not in err
    assert b"error" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_in_a_drain_ends_serve_at_once_with_one_line_and_status_1(number):
    with start("serve", "--port", "0", "--drain-s", "1000") as process:
        assert process.stderr is not None
        url = ""
        while not url:
            line = process.stderr.readline().decode()
            assert line, "it ended"
            url = line.partition("is ready: http")[2].strip()
        with connect(f"ws{url}/v1/stream") as connection:
            client = Client(connection)
            client.generate(max_tokens=50_000)
            client.until("delta")
            process.send_signal(number)
            client.until("goaway")
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.decode() == "error: told to stop a second time: the drain was cut off\n"


def test_a_reader_that_goes_away_ends_generate_quietly():
    with start("generate", "--prompt", "hi") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"aaa"
        process.stdout.close()
        process.wait(timeout=30)
        err = process.stderr.read()
    assert b"Traceback" not in err
    assert b"Exception" not in err
    assert b"error" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line_and_status_1():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", PROGRAM, "generate", "--prompt", "hi", "--max-tokens", "5"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=30, env=environment())
    (complaint,) = [line for line in done.stderr.decode().splitlines() if line not in PHASES]
    assert (done.returncode, "No space left" in complaint) == (1, True), complaint


def test_a_process_that_is_started_without_standard_streams_answers():
    command = [sys.executable, "-c", PROGRAM, "generate", "--prompt", "hi", "--max-tokens", "5"]
    for closed, shown in (("<&- 2>&-", True), ("<&- >&- 2>&-", False)):
        shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *command]
        done = subprocess.run(shell, stdout=subprocess.PIPE, timeout=30, env=environment())
        assert (done.returncode, len(done.stdout) > 0) == (0, shown)


def test_ctrl_c_while_the_command_line_is_imported_is_quiet():
    program = """
import sys

class Interrupted:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "streamengine.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted)
from streamengine.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, env=environment())
    assert (done.returncode, done.stderr) == (130, b"")


def test_ctrl_c_at_the_moment_an_answer_begins_ends_it_as_well(monkeypatch, capsys):
    """Such a moment was between the start of a task and the assignment of what would end it."""
    runner = FakeRunner(kv=fake_kv(4097, 16), model=fake_model(60000), answer=lambda context, sampling: ord("a"))
    use(runner, monkeypatch.setattr)
    start = BlockingPortal.start_task_soon

    def start_and_press(self, task, *arguments):
        future = start(self, task, *arguments)
        if task is chat.show:
            signal.raise_signal(signal.SIGINT)
        return future

    monkeypatch.setattr(BlockingPortal, "start_task_soon", start_and_press)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    before = signal.getsignal(signal.SIGINT)
    assert cli.run(["chat"]) == 0
    assert set(capsys.readouterr().out) <= {"a", "\n"}
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_chat_ends_the_answer_and_not_the_conversation():
    with start("chat", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert process.stdout.read(3) == b"aaa"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().endswith(b"\n")
        process.stdin.write(b"again\n")
        process.stdin.flush()
        assert process.stdout.read(3) == b"aaa"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"Traceback" not in err
