"""``streamengine guided check``: try a schema, and answers to it, before it is deployed."""

import sys
from codecs import BOM_UTF8
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from streamengine.errors import GrammarError, InvalidRequest

app = typer.Typer(help="Try schemas before they are deployed.", no_args_is_help=True)


@app.command()
def check(
    *,
    schema: Annotated[Path | None, typer.Option("--schema", help="File with a schema; - is standard input.")] = None,
    text: Annotated[Path | None, typer.Option("--text", help="File with an answer; - is standard input.")] = None,
    jsonl: Annotated[
        bool,
        typer.Option("--jsonl", help='Read {"schema", "text"} lines from standard input, answer each with a line.'),
    ] = False,
) -> None:
    """Say whether a schema compiles, and whether a text is a whole answer; exit status 1 where it is not."""
    if jsonl == (schema is not None) or (jsonl and text is not None):
        raise typer.BadParameter("give either --schema, with or without --text, or --jsonl")
    if text is not None and str(schema) == str(text) == "-":
        raise typer.BadParameter("--schema and --text cannot both be standard input")
    # The grammar engine and numpy take longer to import than the rest of the command line.
    from streamengine.guided.matcher import Vocabulary
    from streamengine.guided.trial import Trial
    from streamengine.guided.verdict import Question, judge, judge_line

    vocabulary = Vocabulary.of_bytes()
    with closing(Trial()) as trial:
        if jsonl:
            for number, line in enumerate(sys.stdin.buffer):
                if line := (line if number else line.removeprefix(BOM_UTF8)).strip():
                    typer.echo(msgspec.json.encode(judge_line(line, vocabulary, trial)))
            return
        assert schema is not None, "checked above"
        question = Question(schema=_read_schema(schema), text=None if text is None else _read(text))
        verdict = judge(question, vocabulary, trial)
    typer.echo("the schema compiles" if verdict.compiles else f"the schema is refused: {verdict.error}")
    if verdict.accepts is not None:
        typer.echo(f"the text is {'' if verdict.accepts else 'not '}a whole answer")
    if not verdict.compiles or verdict.accepts is False:
        raise typer.Exit(1)


def response_format(schema: Path | None, regex: str | None, choices: list[str]) -> dict[str, Any] | None:
    """Of the options of a command, of which one may be given."""
    if (schema is not None) + (regex is not None) + bool(choices) > 1:
        raise typer.BadParameter("give one of --schema, --regex and --choice")
    if schema is not None:
        return {"type": "json_schema", "json_schema": {"schema": _read_schema(schema)}}
    if regex is not None:
        return {"type": "regex", "regex": regex}
    return {"type": "choice", "choice": choices} if choices else None


def _read(path: Path) -> str:
    """An answer, to the byte; without the end of a line that editors leave behind it."""
    try:
        text = _content(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no UTF-8: {error.reason} at byte {error.start}", param=str(path)) from error
    return text.removesuffix("\n").removesuffix("\r")


def _read_schema(path: Path) -> Any:
    try:
        return msgspec.json.decode(_content(path))
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"{path} is no JSON: {error}") from error


def _content(path: Path) -> bytes:
    """Without the mark that some editors begin a file with."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param=str(path)) from error
    return content.removeprefix(BOM_UTF8)
