"""``streamengine guided check``, as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamengine.cli import app
from streamengine.cli import run as main

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def run(*arguments: str, stdin: str | bytes = "") -> tuple[int, str]:
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


def test_what_editors_add_around_a_file_is_no_part_of_it(schema: str, tmp_path: Path) -> None:
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + json.dumps(SCHEMA).encode() + b"\r\n")
    (tmp_path / "answer.json").write_bytes(b'\xef\xbb\xbf{"n": 3}\r\n')
    accepted = (0, "the schema compiles\nthe text is a whole answer\n")
    assert run("--schema", str(marked), "--text", str(tmp_path / "answer.json")) == accepted
    assert run("--schema", "-", "--text", str(tmp_path / "answer.json"), stdin=marked.read_bytes()) == accepted


@pytest.mark.parametrize("text", [b'{"n": 3}\n\n', b'{\r\n"n": 3}', b'{"n": 3}\x00', b"", b"\n"])
def test_within_a_text_every_byte_counts(schema: str, text: bytes) -> None:
    assert run("--schema", schema, "--text", "-", stdin=text) == (
        1,
        "the schema compiles\nthe text is not a whole answer\n",
    )


def test_no_line_keeps_another_from_its_answer() -> None:
    good = b'{"schema": {"type": "integer"}, "text": "1"}'
    deep = b'{"schema": ' + b'{"not": ' * 50_000 + b"1" + b"}" * 50_000 + b"}"
    lines = [b"\xef\xbb\xbf" + good, b"", b"  \r", b'{"schema": {"const": "\xff"}}', good + b"\r", deep, b"\x00", good]
    status, output = run("--jsonl", stdin=b"\n".join(lines))
    verdicts = [json.loads(line) for line in output.splitlines()]
    assert status == 0
    assert [verdict["compiles"] for verdict in verdicts] == [True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "truncated"), (b"\xff\xfe{", "byte 0"), (b'{"maximum": NaN}', "byte 12"), (b"[" * 99_999, "recursion")],
)
def test_a_file_that_holds_no_schema_is_named_with_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    (tmp_path / "s.json").write_bytes(content)
    assert main(["guided", "check", "--schema", str(tmp_path / "s.json")]) == 2
    told = capsys.readouterr().err
    assert "s.json is no JSON" in told
    assert says in told


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_no_verdict(
    schema: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["guided", "check", "--schema", str(tmp_path / name)]) == 2
    assert main(["guided", "check", "--schema", schema, "--text", str(tmp_path / name)]) == 2
    (tmp_path / "latin.txt").write_bytes(b'{"n": "\xff"}')
    assert main(["guided", "check", "--schema", schema, "--text", str(tmp_path / "latin.txt")]) == 2
    told = capsys.readouterr().err
    assert told.count("cannot be read") == 2
    assert "no UTF-8: invalid start byte at byte 7" in told


@pytest.mark.parametrize("arguments", [(), ("--jsonl", "--text", "-"), ("--schema", "-", "--text", "-")])
def test_contradicting_options_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2
