"""``streamengine guided check``: try a schema, and answers to it, before it is deployed."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from streamengine.errors import GrammarError

app = typer.Typer(help="Try schemas before they are deployed.", no_args_is_help=True)


@app.command()
def check(
    *,
    schema: Annotated[Path | None, typer.Option("--schema", help="File with a JSON Schema.", exists=True)] = None,
    text: Annotated[Path | None, typer.Option("--text", help="File with an answer; - is standard input.")] = None,
    jsonl: Annotated[
        bool,
        typer.Option("--jsonl", help='Read {"schema", "text"} lines from standard input, answer each with a line.'),
    ] = False,
) -> None:
    """Say whether a schema compiles, and whether a text is a whole answer; exit status 1 where it is not."""
    if jsonl == (schema is not None) or (jsonl and text is not None):
        raise typer.BadParameter("give either --schema, with or without --text, or --jsonl")
    # The grammar engine and numpy take longer to import than the rest of the command line.
    from streamengine.guided.matcher import Vocabulary
    from streamengine.guided.trial import Trial
    from streamengine.guided.verdict import Question, judge, judge_line

    vocabulary = Vocabulary.of_bytes()
    with closing(Trial()) as trial:
        if jsonl:
            for line in filter(str.strip, sys.stdin):
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
    """A file that ends with a line feed, as editors leave it, is the answer without it."""
    return (sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")).removesuffix("\n")


def _read_schema(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"{path} is no JSON: {error}") from error
