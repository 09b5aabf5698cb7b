"""C++ sources → a shared library, compiled by the machine's own compiler at first use and cached on disk.

Owns the file's life: its name is a hash of its content's causes, so a warm start hashes a few files and runs
no compiler. Any number of processes may do this at once: each sees the whole file or none. A file that is
torn, damaged or could have been written by somebody else is built again and never loaded.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-march=native")
_FIXED_FLAGS = ("-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast")
_COMPILE_TIMEOUT_S = 600  # ten seconds on an idle machine, minutes on a busy one with sanitizers
_DIGEST_BYTES = hashlib.sha256().digest_size
_CPU_FACTS = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")

built: list[str] = []
"""Libraries that this process has compiled, for `compiled.compilations`."""

log = logging.getLogger(__name__)


class KernelUnavailable(Exception):
    """A library can not be compiled or loaded here. One line says why."""


def load_library(
    sources: Sequence[Path], folder: Path | None = None, *, flags: Sequence[str] = FLAGS, compiler: str = "g++"
) -> ctypes.CDLL:
    """Load the library of ``sources`` from ``folder``, compiling it first if it is not there.

    The first source is compiled, the others are what it includes. ``folder`` is ``streamengine/kernels`` in the
    user's cache by default. The OpenMP runtime is the one that the process has. Raises `KernelUnavailable`.
    """
    folder = _user_cache() if folder is None else folder
    command = (compiler, *_FIXED_FLAGS, *flags)
    try:
        path = folder / f"{sources[0].stem}-{_key(sources, command)}.so"
        fault = _fault(path)
        if fault is not None:
            if path.exists():
                log.warning("%s %s: building it again", path, fault)
            _build(path, command, sources[0])
        return _open(path)
    except OSError as error:
        raise KernelUnavailable(f"{sources[0].name}: {error}") from error


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "streamengine" / "kernels"


def _key(sources: Sequence[Path], command: Sequence[str]) -> str:
    """A hash of all that decides about the machine code but the compiler's version, which is not asked for."""
    causes = [*(source.read_bytes() for source in sources), " ".join(command).encode(), _machine().encode()]
    return hashlib.sha256(b"".join(hashlib.sha256(cause).digest() for cause in causes)).hexdigest()[:32]


def _machine() -> str:
    """What ``-march=native`` depends on, and the C library."""
    facts = [platform.machine(), *platform.libc_ver()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text().partition("\n\n")[0]
        facts += [line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FACTS]
    else:
        facts.append(platform.processor())
    return "\n".join(facts)


def _fault(path: Path) -> str | None:
    """Why the file is not to be loaded, None if it is whole and nobody else's. A torn one can kill the process."""
    try:
        status, content = path.stat(), path.read_bytes()
    except FileNotFoundError:
        return "is not there"
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        return "can be written by others"
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        return "is damaged"
    return None


def _build(path: Path, command: Sequence[str], source: Path) -> None:
    """Compile beside ``path`` and rename into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, linked = Path(scratch) / "library.o", Path(scratch) / "library.so"
        _call(*command, "-c", str(source), "-o", str(compiled))
        # Linked without -fopenmp: the OpenMP runtime must be the one that torch has loaded, see _open.
        linking = [flag for flag in command if flag.startswith(("-fsanitize", "-L", "-l"))]
        _call(command[0], "-shared", str(compiled), *linking, "-o", str(linked))
        with linked.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        linked.chmod(0o755)
        linked.replace(path)
    built.append(path.name)


def _open(path: Path) -> ctypes.CDLL:
    # A second OpenMP runtime would have threads of its own, which spin against torch's. torch loads its
    # runtime with global symbols; only where it does not, the system's own is loaded.
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} can not be run: {error}") from error
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise KernelUnavailable(f"{command[0]} failed with status {done.returncode}: {reason[0]}")
