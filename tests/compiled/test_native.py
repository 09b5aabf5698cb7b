"""A library's life on disk: compiled once, found again, shared, repaired, or plainly unavailable."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from compiled.attention.cpu import load_kernel
from compiled.native import KernelUnavailable, load_library

QUICK = ("-O0",)


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    source, header = tmp_path / "answer.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    header.write_text("#define ANSWER 42\n")
    return [source, header]


def load(sources: list[Path], **options: Any) -> Path:
    """The library's file, after it was seen to work."""
    library = load_library(sources, sources[0].parent / "cache", **{"flags": QUICK, **options})
    assert library.answer() == 42
    return Path(library._name)


def test_a_library_is_compiled_once_and_found_again(sources: list[Path]) -> None:
    first = load(sources)
    made = first.stat()
    assert load(sources) == first
    assert first.stat().st_ino == made.st_ino
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_library_that_is_there_needs_no_compiler(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load(sources)
    monkeypatch.setenv("PATH", "")
    load(sources)


def test_other_flags_and_another_header_are_another_library(sources: list[Path]) -> None:
    first = load(sources)
    assert load(sources, flags=("-O1",)) != first
    sources[1].write_text("#define ANSWER 40 + 2\n")
    assert load(sources) != first


@pytest.mark.parametrize("keep", [0, 5000, -1])
def test_a_truncated_file_is_compiled_again_and_said(
    keep: int, sources: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = load(sources)
    content = path.read_bytes()
    path.unlink()  # not truncated in place: it is mapped into this process
    path.write_bytes(content[:keep])
    path.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        load(sources)
    assert len(path.read_bytes()) >= len(content)
    assert [record.message for record in caplog.records] == [f"{path} is damaged: building it again"]


def test_a_file_that_others_can_write_is_not_loaded(sources: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    path = load(sources)
    path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        load(sources)
    assert "can be written by others" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o755


def test_several_that_compile_at_once_all_get_a_whole_library(sources: list[Path]) -> None:
    # Threads: the compilers are processes of their own, and what is shared is only the folder.
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(load(sources))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 3
    assert len({*paths}) == 1
    assert len(list(paths[0].parent.iterdir())) == 1


def test_the_default_folder_is_the_users_cache(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(load_library(sources)._name).parent == tmp_path / "streamengine" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Path(load_library(sources)._name).parent == tmp_path / "home" / ".cache" / "streamengine" / "kernels"


def test_without_a_compiler_the_library_is_unavailable(sources: list[Path]) -> None:
    with pytest.raises(KernelUnavailable, match="no-such-compiler can not be run"):
        load(sources, compiler="no-such-compiler")


def test_a_compiler_that_fails_tells_why(sources: list[Path]) -> None:
    with pytest.raises(KernelUnavailable, match=r"g\+\+ failed with status 1: .*-fno-such-flag"):
        load(sources, flags=("-fno-such-flag",))


def test_a_folder_that_cannot_be_written_makes_the_library_unavailable(sources: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KernelUnavailable, match=r"answer.cpp: .*file"):
        load_library(sources, tmp_path / "file" / "folder")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see what is loaded")
def test_the_attention_kernel_brings_no_openmp_runtime_of_its_own(tmp_path: Path) -> None:
    def runtimes() -> set[str]:
        names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        return {name for name in names if "omp" in os.path.basename(name)}

    before = runtimes()
    load_kernel(tmp_path, flags=QUICK)
    assert runtimes() == before
