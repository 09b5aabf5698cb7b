"""`streamengine kernels`: what is asked of the builder, and what a person sees."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from streamengine import cli, compose
from streamengine.config import EngineConfig
from streamengine.errors import StartupError
from streamengine.link import Progress

NEW = {"name": "new", "library": "/out/new/new.so", "seconds": 61.2}
OLD = {"name": "old", "library": "/out/old/old.so", "seconds": 0.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the builder was asked for; it answers with one module that it built and one that was there."""
    calls: list[Any] = []

    def build(config: EngineConfig, arch: str, out: str | None, progress: Callable[[Progress], None]) -> Any:
        calls.append((config, arch, out))
        progress(Progress("kernels", 1, 2))
        return [NEW, OLD]

    monkeypatch.setattr(compose, "build_kernels", build)
    return calls


def test_kernels_are_built_for_a_model_an_architecture_and_a_place(asked: list[Any], capsys: Any) -> None:
    line = ["kernels", "build", "--model", "folder", "--arch", "9.0a", "--kv-dtype", "fp8_e4m3", "--out", "/out"]
    assert cli.run(line) == 0
    assert asked == [(EngineConfig(model="folder", kv_dtype="fp8_e4m3"), "9.0a", "/out")]
    said = capsys.readouterr()
    assert said.out == "/out/new/new.so was built in 61 s\n/out/old/old.so was built before\n"
    assert "flashinfer/data/aot" in said.err


def test_as_json_it_is_one_object(asked: list[Any], capsys: Any) -> None:
    assert cli.run(["kernels", "build", "--arch", "9.0a 12.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": EngineConfig().model,
        "arch": "9.0a 12.0",
        "modules": [NEW, OLD],
    }


def test_an_option_that_decides_nothing_about_kernels_is_not_taken(asked: list[Any], capsys: Any) -> None:
    assert cli.run(["kernels", "build", "--arch", "9.0a", "--max-num-seqs", "4"]) == 2
    assert "max-num-seqs" in capsys.readouterr().err
    assert cli.run(["kernels", "build"]) == 2
    assert "--arch" in capsys.readouterr().err
    assert asked == []


def test_the_list_says_where_a_module_is_or_what_a_start_would_do(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = [
        {"name": "one", "library": "/site/one.so", "at_start": None},
        {"name": "two", "library": None, "at_start": "it is compiled"},
    ]
    monkeypatch.setattr(compose, "look_for_kernels", lambda config: found)
    assert cli.run(["kernels", "ls"]) == 0
    assert capsys.readouterr().out == "one  /site/one.so\ntwo  missing: it is compiled\n"
    assert cli.run(["kernels", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == found


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def look(config: EngineConfig) -> Any:
        raise StartupError("flashinfer is not installed; get it with: so")

    monkeypatch.setattr(compose, "look_for_kernels", look)
    assert cli.run(["kernels", "ls"]) == 2
    assert capsys.readouterr().err == "error: flashinfer is not installed; get it with: so\n"
