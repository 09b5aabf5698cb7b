"""``streamengine guided check``, as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamengine.cli import app

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def run(*arguments: str, stdin: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["guided", "check", *arguments], input=stdin)
    return result.exit_code, result.stdout


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


def test_a_schema_that_can_be_kept_compiles(schema: str) -> None:
    assert run("--schema", schema) == (0, "the schema compiles\n")


@pytest.mark.parametrize(
    ("text", "status", "verdict"), [('{"n": 3}\n', 0, "a whole answer"), ('{"n": 3', 1, "not a whole answer")]
)
def test_a_text_is_a_whole_answer_or_not(schema: str, tmp_path: Path, text: str, status: int, verdict: str) -> None:
    (tmp_path / "answer.json").write_text(text)
    expected = (status, f"the schema compiles\nthe text is {verdict}\n")
    assert run("--schema", schema, "--text", str(tmp_path / "answer.json")) == expected
    assert run("--schema", schema, "--text", "-", stdin=text) == expected


def test_a_refused_schema_is_told_by_keyword_and_path(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}))
    assert run("--schema", str(path)) == (1, "the schema is refused: not cannot be enforced, at $.properties.a.not\n")


def test_each_line_is_answered_by_a_line() -> None:
    questions: list[Any] = [
        {"schema": SCHEMA, "text": '{"n": 1}'},
        {"schema": SCHEMA, "text": '{"n": "x"}'},
        {"schema": SCHEMA},
        {"schema": {"uniqueItems": True}, "text": "[]"},
        {"schema": True},
        {"text": "1"},
    ]
    status, output = run("--jsonl", stdin="".join(f"{json.dumps(question)}\n" for question in questions) + "no json\n")
    verdicts = [json.loads(line) for line in output.splitlines()]
    assert status == 0
    assert [verdict["accepts"] for verdict in verdicts] == [True, False, None, None, None, None, None]
    assert [verdict["compiles"] for verdict in verdicts] == [True, True, True, False, False, False, False]
    assert verdicts[3]["error"] == "uniqueItems cannot be enforced, at $.uniqueItems"


@pytest.mark.parametrize("arguments", [(), ("--jsonl", "--text", "-")])
def test_contradicting_options_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2
