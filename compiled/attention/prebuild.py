"""Builds FlashInfer's modules on a machine without a GPU, for an image: nvcc and ninja are all it takes.

FlashInfer reads its environment when it is imported, so it is asked in a process of its own (`main`), which gets one
line of JSON and answers a line for each module.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compiled.attention.modules import DISABLE, Built, Module, installed, spec_of
from compiled.step import LoadError
from compiled.weights import cache_folder

ANY_ARCH = "9.0a"
"""FlashInfer refuses to name a module before it knows of a GPU; the name does not depend on which."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles and links: the folder of CUDA's compiler and headers, and ninja."""

    cuda_home: Path
    ninja: Path

    @classmethod
    def find(cls) -> "Toolchain":
        """Raises LoadError that names all that is missing, and where it was looked for."""
        home, ninja = _cuda_home(), _ninja()
        missing = []
        if home is None:
            where = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda or PATH"
            missing.append(f"CUDA's compiler (bin/nvcc with its headers; CUDA_HOME says where) in {where}")
        if ninja is None:
            missing.append("ninja (pip install ninja)")
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            missing.append("a C++ compiler")
        if missing or home is None or ninja is None:
            raise LoadError(f"FlashInfer's modules cannot be compiled here: there is no {', and no '.join(missing)}")
        return cls(home, ninja)

    def check(self, archs: str) -> None:
        """Raises LoadError for an architecture that is none, or that this nvcc does not know."""
        known = _output(str(self.cuda_home / "bin" / "nvcc"), "--list-gpu-arch").split()
        for arch in archs.split():
            if not re.fullmatch(r"\d{1,2}\.\d[af]?", arch):
                raise LoadError(f"arch must be like 9.0a, or several with blanks between them, not {arch!r}")
            if f"compute_{arch.replace('.', '').rstrip('af')}" not in known:
                raise LoadError(f"arch {arch} is not known to {self.cuda_home}/bin/nvcc, which has {', '.join(known)}")
        if not archs.split():
            raise LoadError("arch is empty; give the compute capability of the GPU, 9.0a for an H100 or H200")

    def environment(self, archs: str, work: Path) -> dict[str, str]:
        """That of the process which builds; ``work`` keeps its object files and a driver library to link against."""
        stub = _stub(work)
        ldflags = f"{os.environ.get('FLASHINFER_EXTRA_LDFLAGS', '')} -L{stub.parent}".strip()
        path = f"{self.ninja.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        given = {name: value for name, value in os.environ.items() if name != DISABLE}
        return given | {
            "CUDA_HOME": str(self.cuda_home),
            "PATH": path,
            "FLASHINFER_CUDA_ARCH_LIST": archs,
            "FLASHINFER_WORKSPACE_BASE": str(work),
            "FLASHINFER_EXTRA_LDFLAGS": ldflags,
            "FLASHINFER_LOGGING_LEVEL": "error",
        }


def _cuda_home() -> Path | None:
    """The folder that the environment names, and no other then; or the one that is installed."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(named or "/usr/local/cuda")]
    if not named and (nvcc := shutil.which("nvcc")):
        places.append(Path(nvcc).resolve().parent.parent)
    for place in places:
        if (place / "bin" / "nvcc").is_file() and (place / "include" / "cuda_runtime.h").is_file():
            return place
    return None


def _ninja() -> Path | None:
    """Also that of this interpreter's environment, whose scripts need not be on the path."""
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.is_file() else shutil.which("ninja")
    return None if found is None else Path(found)


def _stub(work: Path) -> Path:
    """A ``libcuda.so`` without any function. The driver's own comes with the driver, which this machine may lack, and
    no module of attention calls it; but they are all linked with it."""
    path = work / "stubs" / "libcuda.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = (os.environ.get("CXX", "c++"), "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull)
        _output(*command, "-o", str(unfinished))
        unfinished.replace(path)
    return path


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LoadError(f"{command[0]} failed: {getattr(error, 'stderr', None) or error}") from error
    return done.stdout


def workplace() -> Path:
    """Where object files are kept, so that a build that was stopped goes on where it was."""
    return cache_folder() / "flashinfer"


@dataclass(frozen=True)
class Answer:
    """Of one module: its name, its library if there is one, and the seconds that building it took."""

    name: str
    library: str | None
    seconds: float = 0.0


def build(
    modules: Sequence[Module], archs: str, out: Path | None, report: Callable[[str, float, float], None]
) -> list[Answer]:
    """Build ``modules`` into ``out``, or where the installed FlashInfer looks for them; minutes each. What is built
    already, by this FlashInfer for these ``archs``, is left alone.

    Raises:
        LoadError: FlashInfer or a compiler is missing, or does not take a module.
    """
    version, place = installed()
    tools = Toolchain.find()
    tools.check(archs)
    out = place if out is None else out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"{out} cannot be written: {error.strerror}; give another folder") from error
    env = tools.environment(archs, workplace())
    return _ask(modules, env, {"out": str(out), "built": asdict(Built(version, archs))}, report)


def look(modules: Sequence[Module]) -> list[Answer]:
    """Which of ``modules`` the installed FlashInfer has. Raises LoadError without FlashInfer."""
    installed()
    env = dict(os.environ) | {"FLASHINFER_LOGGING_LEVEL": "error"}
    env.setdefault("FLASHINFER_CUDA_ARCH_LIST", ANY_ARCH)
    return _ask(modules, env, {}, lambda *_: None)


def _ask(
    modules: Sequence[Module],
    env: Mapping[str, str],
    task: Mapping[str, Any],
    report: Callable[[str, float, float], None],
) -> list[Answer]:
    report("kernels", 0, len(modules))
    # The child finds what this interpreter finds, wherever that was started.
    env = {**env, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    question = json.dumps({**task, "modules": [asdict(module) for module in modules]})
    command = (sys.executable, "-m", "compiled.attention.prebuild", question)
    answers: list[Answer] = []
    rest: list[str] = []
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                try:
                    answers.append(Answer(**json.loads(line)))
                    report("kernels", len(answers), len(modules))
                except (ValueError, TypeError):
                    rest = [*rest, line.rstrip()][-200:]
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)  # with the compilers that it has started
            raise
    if child.returncode != 0 or len(answers) != len(modules):
        raise LoadError(f"FlashInfer could not be asked: {_reason(rest) or f'exit status {child.returncode}'}")
    return answers


def _reason(lines: Sequence[str]) -> str:
    """The compiler's first error, or else the last thing that was said."""
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    return (errors or list(lines)[-1:] or [""])[0]


def main(question: str) -> None:
    """In the process of `_ask`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task = json.loads(question)
    for module in (Module(**told) for told in task["modules"]):
        spec = spec_of(module)
        if "out" in task:
            answer = _build(spec, Path(task["out"]), Built(**task["built"]))
        else:
            answer = Answer(spec.name, str(spec.get_library_path()) if spec.is_compiled else None)
        sys.stdout.write(json.dumps(asdict(answer)) + "\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """However that ends: compilers that nobody waits for would run on for minutes."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _build(spec: Any, out: Path, built: Built) -> Answer:
    library = out / spec.name / f"{spec.name}.so"
    if library.exists() and Built.read(library) == built:
        return Answer(spec.name, str(library))
    started = time.perf_counter()
    spec.build(need_lock=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    try:
        # The old note must not stand beside the new library, should this end in between.
        with suppress(FileNotFoundError):
            (library.parent / "built.json").unlink()
        shutil.copyfile(spec.jit_library_path, unfinished)
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)
    built.write(library)
    return Answer(spec.name, str(library), time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1])
