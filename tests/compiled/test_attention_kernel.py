"""The kernel's life on disk: compiled once, found again, shared, repaired, or plainly unavailable."""

import os
import threading
from pathlib import Path

import pytest
import torch

from compiled.attention.cpu import CpuAttention, Kernel, KernelUnavailable, load_kernel
from compiled.attention.reference import ReferenceAttention
from tests.compiled.paged import Batch

QUICK = ("-O0",)


def assert_works(kernel: Kernel) -> None:
    batch = Batch([(1, 33), (20, 40)])
    out, _ = batch.run(CpuAttention, kernel=kernel)
    torch.testing.assert_close(out, batch.run(ReferenceAttention)[0], rtol=1e-5, atol=1e-5)


def test_a_kernel_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    first = load_kernel(tmp_path, flags=QUICK)
    made = first.path.stat()
    again = load_kernel(tmp_path, flags=QUICK)
    assert again.path == first.path
    assert again.path.stat().st_ino == made.st_ino
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    assert_works(again)


def test_other_flags_are_another_kernel(tmp_path: Path) -> None:
    assert load_kernel(tmp_path, flags=QUICK).path != load_kernel(tmp_path, flags=("-O1",)).path


@pytest.mark.parametrize("keep", [0, 5000, -1])
def test_a_truncated_file_is_compiled_again(keep: int, tmp_path: Path) -> None:
    path = load_kernel(tmp_path, flags=QUICK).path
    content = path.read_bytes()
    path.unlink()  # not truncated in place: it is mapped into this process
    path.write_bytes(content[:keep])
    kernel = load_kernel(tmp_path, flags=QUICK)
    assert len(path.read_bytes()) >= len(content)
    assert_works(kernel)


def test_several_that_compile_at_once_all_get_a_whole_kernel(tmp_path: Path) -> None:
    # Threads: the compilers are processes of their own, and what is shared is only the folder.
    kernels: list[Kernel] = []
    threads = [threading.Thread(target=lambda: kernels.append(load_kernel(tmp_path, flags=QUICK))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(kernels) == 3
    assert len({kernel.path for kernel in kernels}) == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert_works(kernels[0])


def test_the_default_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel(flags=QUICK).path.parent == tmp_path / "streamengine" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_kernel(flags=QUICK).path.parent == tmp_path / "home" / ".cache" / "streamengine" / "kernels"


def test_without_a_compiler_the_kernel_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match="no-such-compiler can not be run"):
        load_kernel(tmp_path, compiler="no-such-compiler")


def test_a_compiler_that_fails_tells_why(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"g\+\+ failed with status 1: .*-fno-such-flag"):
        load_kernel(tmp_path, flags=("-fno-such-flag",))


def test_a_folder_that_cannot_be_written_makes_the_kernel_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KernelUnavailable, match="file"):
        load_kernel(tmp_path / "file" / "folder", flags=QUICK)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see what is loaded")
def test_the_kernel_brings_no_openmp_runtime_of_its_own(tmp_path: Path) -> None:
    def runtimes() -> set[str]:
        names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        return {name for name in names if "omp" in os.path.basename(name)}

    before = runtimes()
    assert_works(load_kernel(tmp_path, flags=QUICK))
    assert runtimes() == before
