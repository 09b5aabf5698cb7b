"""The fast CPU backend: builds, caches and calls the kernel in ``paged_attention.cpp``.

Owns the shared object's life on disk and the C structures. The kernel knows no torch: it is compiled by
the machine's own C++ compiler in seconds, at first use, and found again by the content of its key. Whoever
builds a `CpuAttention` decides what to do about `KernelUnavailable`.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled.attention.base import DTYPES, Attention, AttentionSpec, Plan

SOURCES = ("paged_attention.cpp", "plan.h", "product.h", "simd.h")
FLAGS = ("-O3", "-march=native")
_FIXED_FLAGS = ("-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast")
_COMPILE_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelUnavailable(Exception):
    """The kernel can not be compiled or loaded here. One line says why."""


class _Problem(ctypes.Structure):
    """What is constant over a step; mirrors ``Problem`` in the kernel."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dtype", "heads", "kv_heads", "head_dim", "page_size")),
        *((name, ctypes.c_int64) for name in ("page_stride", "slot_stride", "head_stride")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("window", "rows", "threads")),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")),
    ]


class _Operands(ctypes.Structure):
    """One run's tensors; mirrors ``Operands`` in the kernel. Strides count elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "k_cache", "v_cache")),
        ("tokens", ctypes.c_int64),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "k", "v", "out") for axis in ("token", "head")),
    ]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel's three functions, and the file they came from."""

    path: Path
    workspace: Any
    plan: Any
    run: Any


class CpuAttention(Attention):
    """Flash-style attention on all threads. D must be a multiple of 8.

    A token's result has the same bits whatever its batch mates, the chunk it came in and ``threads``.
    """

    name = "cpu"

    def __init__(
        self,
        spec: AttentionSpec,
        layers: Sequence[tuple[Tensor, Tensor]],
        kernel: Kernel | None = None,
        threads: int | None = None,
    ) -> None:
        """``threads`` defaults to torch's at this time; ``kernel`` to `load_kernel`, with its exception."""
        super().__init__(spec, layers)
        if spec.head_dim % 8:
            raise ValueError(f"head_dim {spec.head_dim} is no multiple of 8")
        if self.device.type != "cpu":
            raise ValueError(f"KV cache is on {self.device}, not on the CPU")
        threads = torch.get_num_threads() if threads is None else threads
        if threads < 1:
            raise ValueError(f"threads is {threads}, not at least 1")
        self._kernel = load_kernel() if kernel is None else kernel
        self._caches = [(keys.data_ptr(), values.data_ptr()) for keys, values in layers]
        page_stride, slot_stride, head_stride, _ = layers[0][0].stride()
        self._problem = _Problem(
            dtype=DTYPES.index(self.dtype),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=self.page_size,
            page_stride=page_stride,
            slot_stride=slot_stride,
            head_stride=head_stride,
            scale=spec.scale,
            window=spec.window or 0,
            threads=threads,
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def _prepare(self, plan: Plan) -> None:
        problem = self._problem
        problem.rows = plan.rows
        problem.qo_indptr = plan.qo_indptr.data_ptr()
        problem.kv_indptr = plan.kv_indptr.data_ptr()
        problem.kv_indices = plan.kv_indices.data_ptr()
        problem.kv_last_page_len = plan.kv_last_page_len.data_ptr()
        needed = self._kernel.workspace(problem)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed, dtype=torch.uint8)  # torch aligns to 64 bytes
        self._kernel.plan(problem, self._workspace.data_ptr())

    def _run(self, plan: Plan, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, out_THD: Tensor) -> None:
        strides = (stride for operand in (q_THD, k_TKD, v_TKD, out_THD) for stride in operand.stride()[:2])
        operands = _Operands(
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            out_THD.data_ptr(),
            *self._caches[layer],
            q_THD.shape[0],
            *strides,
        )
        self._kernel.run(self._problem, operands, self._workspace.data_ptr())


def load_kernel(cache_dir: Path | None = None, *, compiler: str = "g++", flags: Sequence[str] = FLAGS) -> Kernel:
    """Load the kernel from ``cache_dir``, compiling it first if it is not there or damaged.

    The default folder is ``streamengine/kernels`` in the user's cache. The file's name is a hash of the
    sources, the flags and all the compiler predefines, which tell its version and the CPU's features.
    Any number of processes may do this at once. Raises `KernelUnavailable`.
    """
    folder = _user_cache() if cache_dir is None else cache_dir
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    flags = (*_FIXED_FLAGS, *flags)
    predefined = _call(compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull)
    key = hashlib.sha256()
    for part in (*(source.read_bytes() for source in sources), " ".join(flags).encode(), predefined):
        key.update(hashlib.sha256(part).digest())
    path = folder / f"attention-{key.hexdigest()[:32]}.so"
    try:
        if not _is_whole(path):
            _build(path, compiler, flags, sources[0])
        return _open(path)
    except OSError as error:
        raise KernelUnavailable(f"{path}: {error}") from error


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "streamengine" / "kernels"


def _build(path: Path, compiler: str, flags: Sequence[str], source: Path) -> None:
    """Compile beside ``path`` and rename into place: another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, linked = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        _call(compiler, *flags, "-c", str(source), "-o", str(compiled))
        # Linked without -fopenmp: the OpenMP runtime must be the one that torch has loaded, see _open.
        _call(compiler, "-shared", str(compiled), "-o", str(linked))
        with linked.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        linked.replace(path)


def _is_whole(path: Path) -> bool:
    """Whether the file ends in the digest of what precedes it. Loading a torn file can kill the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _open(path: Path) -> Kernel:
    # A second OpenMP runtime would have threads of its own, which spin against torch's. torch loads its
    # runtime with global symbols; only where it does not, the system's own is loaded.
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    problem, operands = ctypes.POINTER(_Problem), ctypes.POINTER(_Operands)
    workspace, plan, run = (getattr(library, f"paged_attention_{name}") for name in ("workspace", "plan", "run"))
    workspace.argtypes, workspace.restype = (problem,), ctypes.c_int64
    plan.argtypes, plan.restype = (problem, ctypes.c_void_p), None
    run.argtypes, run.restype = (problem, operands, ctypes.c_void_p), None
    return Kernel(path=path, workspace=workspace, plan=plan, run=run)


def _call(*command: str) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} can not be run: {error}") from error
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise KernelUnavailable(f"{command[0]} failed with status {done.returncode}: {reason[0]}")
    return done.stdout
