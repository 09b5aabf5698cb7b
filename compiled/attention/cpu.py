"""The fast CPU backend: calls the kernel in ``paged_attention.cpp``.

Owns the C structures. The kernel knows no torch: `compiled.native` compiles it at first use. Whoever builds a
`CpuAttention` decides what to do about `KernelUnavailable`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from compiled.attention.base import DTYPES, FP8, Attention, AttentionSpec
from compiled.attention.tables import Plan
from compiled.native import FLAGS, load_library

# What compiled pieces allocate with: a quarter of the time of `torch.empty`.
empty = torch._C._dynamo.guards._empty_strided_cpu

SOURCES = ("paged_attention.cpp", "blocks.h", "formats.h", "plan.h", "product.h", "simd.h", "softmax.h")


class _Problem(ctypes.Structure):
    """What is constant over a step; mirrors ``Problem`` in the kernel."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dtype", "heads", "kv_heads", "key_dim", "value_dim", "page_size")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("key", "value") for axis in ("page", "slot", "head")),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap")),
        *((name, ctypes.c_int64) for name in ("window", "rows", "threads")),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")),
    ]


class _Operands(ctypes.Structure):
    """One run's tensors; mirrors ``Operands`` in the kernel. Strides count elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "sinks", "out", "key_cache", "value_cache")),
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
    """Flash-style attention on all threads. The scale must be positive.

    A token's result has the same bits whatever its batch mates, the chunk it came in and ``threads``.
    """

    name = "cpu"

    @classmethod
    def lacks(
        cls, spec: AttentionSpec, dtype: torch.dtype | None = None, cache: torch.dtype | None = None
    ) -> str | None:
        if cache == FP8:
            return "float8_e4m3fn KV cache"
        return None if spec.scale > 0 else f"scale {spec.scale} (it must be positive)"

    def __init__(
        self,
        spec: AttentionSpec,
        layers: Sequence[tuple[Tensor, Tensor]],
        kernel: Kernel | None = None,
        threads: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        """``threads`` defaults to torch's at this time; ``kernel`` to `load_kernel`, with its exception."""
        super().__init__(spec, layers, dtype=dtype, scales=scales)
        if self.device.type != "cpu":
            raise ValueError(f"KV cache is on {self.device}, not on the CPU")
        threads = torch.get_num_threads() if threads is None else threads
        if threads < 1:
            raise ValueError(f"threads is {threads}, not at least 1")
        self._kernel = load_kernel() if kernel is None else kernel
        self._caches = [(keys.data_ptr(), values.data_ptr()) for keys, values in layers]
        (keys, values), *_ = layers
        self._problem = _Problem(
            DTYPES.index(self.dtype),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_size,
            self.page_size,
            *keys.stride()[:3],
            *values.stride()[:3],
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
            window=spec.window or 0,
            threads=threads,
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._operands, self._strided = _Operands(), self._fitting

    def _again(self) -> Self:
        return type(self)(self.spec, self.layers, self._kernel, self._problem.threads)

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

    def _run(
        self,
        plan: Plan,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        layer: int,
        out_THE: Tensor,
        sinks_H: Tensor | None,
    ) -> None:
        if self._strided is not self._fitting:
            self._strided = self._fitting
            strides = (stride for x in (q_THD, k_TKD, v_TKE, out_THE) for stride in x.stride()[:2])
            self._operands = _Operands(*(None,) * 7, q_THD.shape[0], *strides)
        operands = self._operands
        operands.q, operands.k, operands.v = q_THD.data_ptr(), k_TKD.data_ptr(), v_TKE.data_ptr()
        operands.sinks = None if sinks_H is None else sinks_H.data_ptr()
        operands.out = out_THE.data_ptr()
        operands.key_cache, operands.value_cache = self._caches[layer]
        self._kernel.run(self._problem, operands, self._workspace.data_ptr())

    def output(self, tokens: int) -> Tensor:
        heads, size = self.spec.num_heads, self.spec.value_size
        return empty((tokens, heads, size), (heads * size, size, 1), self.dtype)


def load_kernel(folder: Path | None = None, *, compiler: str = "g++", flags: Sequence[str] = FLAGS) -> Kernel:
    """Load the kernel, compiling it first where `compiled.native` does not find it. Raises `KernelUnavailable`."""
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    library = load_library(sources, folder, flags=flags, compiler=compiler)
    problem, operands = ctypes.POINTER(_Problem), ctypes.POINTER(_Operands)
    workspace, plan, run = (getattr(library, f"paged_attention_{name}") for name in ("workspace", "plan", "run"))
    workspace.argtypes, workspace.restype = (problem,), ctypes.c_int64
    plan.argtypes, plan.restype = (problem, ctypes.c_void_p), None
    run.argtypes, run.restype = (problem, operands, ctypes.c_void_p), None
    return Kernel(path=Path(library._name), workspace=workspace, plan=plan, run=run)
