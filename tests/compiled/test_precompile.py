"""A model is compiled before its weights are there, and the command line says what is kept and why it is not used."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled import build
from compiled.runner import RunnerOptions, build_runner
from streamengine import cli
from tests.compiled import tiny

Run = Callable[..., str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and its config alone."""
    folder = tiny.make(tmp_path_factory.mktemp("model"), "llama")
    config = tmp_path_factory.mktemp("config")
    shutil.copy(folder / "config.json", config)
    return folder, config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))

    def command(*arguments: object) -> str:
        assert cli.run([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return command


@pytest.fixture
def compiled(run: Run, folders: tuple[Path, Path]) -> Path:
    """The folder with the config; there may be nothing to do any more."""
    run("compile", "--model", folders[1], "--dtype", "float32", "--threads", 1)
    return folders[1]


def test_a_first_start_after_compile_compiles_nothing_and_is_checked(
    compiled: Path, folders: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_compile", None)
    options: dict[str, Any] = {"dtype": "float32", "kv_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    assert build_runner(RunnerOptions(model=str(folders[0]), **options), lambda *_: None).kv.pages == 40
    with monkeypatch.context() as unasked:
        unasked.setattr(build, "expect", None)  # it was checked, and that is known
        build_runner(RunnerOptions(model=str(folders[0]), **options), lambda *_: None)


def test_compiling_again_does_nothing(compiled: Path, run: Run) -> None:
    told = json.loads(run("compile", "--model", compiled, "--dtype", "float32", "--threads", 1, "--json"))
    assert (told["compiled"], told["model"]) == (False, str(compiled))


def test_explain_tells_a_hit_and_what_would_miss(compiled: Path, run: Run) -> None:
    same = ("cache", "explain", "--model", compiled, "--dtype", "float32", "--threads", 1)
    assert run(*same) == f"{compiled} is compiled\n"
    assert run(*same, "--max-num-seqs", 3, "--page-size", 8) == f"{compiled} is compiled\n"
    other = json.loads(run("cache", "explain", "--model", compiled, "--dtype", "bfloat16", "--threads", 2, "--json"))
    assert other == {
        "model": str(compiled),
        "hit": False,
        "reason": "dtype: torch.float32 → torch.bfloat16; threads: 1 → 2",
    }


def test_ls_lists_what_is_there_and_clear_removes_it(compiled: Path, run: Run, home: Path) -> None:
    entries = json.loads(run("cache", "ls", "--json"))["entries"]
    assert sorted(entry["kind"] for entry in entries) == ["piece", "piece", "piece", "recipe"]
    assert all(entry["size_bytes"] > 500 and abs(entry["used"] - time.time()) < 600 for entry in entries)
    lines = run("cache", "ls").splitlines()
    assert any(line.startswith("recipe") and line.endswith("2 layers of 3 pieces") for line in lines)
    assert any(str(compiled) in line for line in lines)  # in which order says when each was used last
    assert f"MiB removed from {home}" in run("cache", "clear")
    assert run("cache", "ls") == ""
    assert "nothing is saved for it yet" in run("cache", "explain", "--model", compiled)
