"""The command line: arguments and environment in, exit status out.

0 is success, 2 what the user can put right (one line on stderr, never a traceback), 1 a failed engine
or a drain that a second signal cut, 130 Ctrl-C. Answers go to stdout, everything else to stderr.
"""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from typer.exceptions import TyperException

from streamengine import bench as benchmark
from streamengine import chat as conversation
from streamengine import doctor as machine
from streamengine import fleet, kernels, precompile, replay, scenarios
from streamengine.config import EngineConfig, ServerConfig, TransferConfig
from streamengine.engine import Result, Stream
from streamengine.errors import EngineFailure, ShuttingDown, StreamEngineError
from streamengine.generate import Asked
from streamengine.guided import command as guided
from streamengine.guided.values import ValueTracker
from streamengine.options import ENGINE, SAMPLING, SERVER, TRANSFER, takes
from streamengine.planner import command as planner
from streamengine.sampling import SamplingParams
from streamengine.server import run as server_run
from streamengine.terminal import StartupProgress, open_engine

app = typer.Typer(
    name="streamengine",
    help="Run an open language model and stream its answer, token by token.",
    epilog="Every engine and server option can be set in the environment: --kv-pages as STREAMENGINE_KV_PAGES.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
@takes(ENGINE, SAMPLING)
def generate(
    config: EngineConfig,
    sampling: SamplingParams,
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to answer.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")] = False,
    priority: Annotated[int, typer.Option("--priority", help="A higher one goes first.")] = 0,
    schema: Annotated[Path | None, typer.Option("--schema", help="File with a JSON Schema for the answer.")] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Pattern that the whole answer must match.")] = None,
    choice: Annotated[list[str], typer.Option("--choice", help="A possible answer; may be repeated.")] = [],  # noqa: B006
    close: Annotated[bool, typer.Option("--close-document", help="Complete the answer within --max-tokens.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Print each value as it becomes complete.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt; a single answer streams to stdout."""
    if values and (schema is None or as_json or sampling.answers > 1):
        raise typer.BadParameter("--values needs --schema, a single answer and no --json")
    messages = None if raw else ({"role": "user", "content": prompt},)
    asked: Asked = {"messages": messages, "sampling": sampling, "priority": priority}
    asked["response_format"] = guided.response_format(schema, regex, choice)
    asked["close_document"] = close
    anyio.run(_generate, config, prompt if raw else None, asked, as_json, values)


async def _generate(config: EngineConfig, prompt: str | None, asked: Asked, as_json: bool, values: bool) -> None:
    async with open_engine(config) as engine:
        if values:
            await _print_values(engine.stream(prompt, **asked))
            return
        if as_json:
            _print_json(await engine.generate(prompt, **asked))
            return
        if asked["sampling"].answers == 1:
            result = await conversation.show(engine.stream(prompt, **asked))
        else:
            result = await engine.generate(prompt, **asked)
            for number, choice in enumerate(result.choices, 1):
                typer.echo(f"answer {number} of {len(result.choices)} ({choice.finish_reason}):", err=True)
                typer.echo(choice.text)
        for line in _logprob_lines(result):
            typer.echo(line, err=True)


async def _print_values(stream: Stream) -> None:
    """A line of JSON for each."""
    tracker = ValueTracker()
    async with stream:
        async for text in stream.text:
            for value in tracker.feed(text):
                _print_json(value._asdict())
        if (await stream.result()).finish_reason == "stop":
            for value in tracker.finish():
                _print_json(value._asdict())


def _logprob_lines(result: Result) -> Iterator[str]:
    """One for each token: its log-probability and text, then those of the likeliest ones."""
    answers = [answer.logprobs for answer in result.choices or (result,)]
    for item in chain(result.prompt_logprobs, *answers):
        yield "  ".join(f"{each.logprob:9.4f} {each.text!r}" for each in (item, *item.top))


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.encode(value).decode())


@app.command()
@takes(ENGINE, SAMPLING)
def chat(
    config: EngineConfig,
    sampling: SamplingParams,
    *,
    system: Annotated[str | None, typer.Option("--system", help="Instructions before the conversation.")] = None,
) -> None:
    """Talk with the model. /reset forgets, /exit leaves, Ctrl-C stops an answer."""
    conversation.run(config, sampling, system)


@app.command()
@takes(ENGINE, SERVER, TRANSFER)
def serve(
    config: EngineConfig,
    server: ServerConfig,
    transfer: TransferConfig,
    *,
    restart: Annotated[bool, typer.Option("--restart", help="Start a new core when one dies, and go on.")] = False,
) -> None:
    """Serve WebSockets, HTTP and a web page until SIGTERM or Ctrl-C, then drain."""
    config = msgspec.structs.replace(config, transfer=transfer)
    with StartupProgress() as progress:

        def ready(url: str) -> None:
            progress.stop()
            typer.echo(f"{config.model} is ready: {url}", err=True)

        server_run.serve(config, server, restart=restart, ready=ready, progress=progress)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, what this machine has, and what a default start would do with it."""
    report = machine.examine()
    if as_json:
        _print_json(report)
    else:
        typer.echo("\n".join(machine.lines(report)))


@app.command()
@takes(ENGINE)
def bench(
    config: EngineConfig,
    *,
    scenario: Annotated[
        benchmark.Scenario, typer.Argument(help="What to measure; steps are held against this machine's ceilings.")
    ] = "steps",
) -> None:
    """Time steps, a start, the scheduler, prefixes, guesses, grammars, the server or a split; the last line is JSON."""
    with StartupProgress() as progress:
        benchmark.run(scenario, config, progress, typer.echo)


app.command("ray")(fleet.command)
app.command("replay")(replay.command)
app.command("plan")(planner.command)
app.add_typer(guided.app, name="guided")
app.command("compile")(precompile.compile_model)
app.add_typer(precompile.app)
app.add_typer(scenarios.app)
app.add_typer(kernels.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"streamengine {metadata.version('streamengine')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def run(arguments: Sequence[str]) -> int:
    """Run one command; the exit status."""
    try:
        return app(args=arguments, prog_name="streamengine", standalone_mode=False) or 0
    except TyperException as error:
        if message := error.format_message():  # without a command the help was printed, and nothing is left to say
            _complain(message)
        return 2
    except StreamEngineError as error:
        _complain(error.message)
        return 1 if isinstance(error, EngineFailure | ShuttingDown) else 2
    except OSError as error:  # a full disk behind stdout, for one
        _complain(str(error))
        return 1


def _complain(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)


def _open_standard_streams() -> None:
    """Started without one, a process gives its number to the next file or socket, which then gets what others print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 (for as long as the process lives)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main() -> None:
    _open_standard_streams()
    # A terminal that cannot show a character of the answer shows a substitute.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        # Python would try again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
