"""The pieces of a tiny model, compiled for a GPU by a torch that has none: what Inductor writes, as JSON; with
``compile`` how many of its kernels Triton compiles to machine code for compute capability 9.0, with ``interpret`` (and
``TRITON_INTERPRET=1``) how far what they compute is from the pieces' own graphs.

Run in a process of its own with Triton on the path, because torch is told that there is a GPU: its properties are
those of an H200, and what would ask a driver is answered here. Indexing is written as functions, since Python's own
``x[i]`` looks for the device, and Inductor's patterns of whole subgraphs are left out for the same reason.
"""

import ast
import copy
import json
import operator
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime.hints import DeviceProperties

from compiled import cold, fuse, inductor, move, pieces
from compiled.split import Piece
from compiled.stopwatch import Stopwatch
from compiled.unroll import split_model

H200 = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "total_memory": 141 << 30,
    "gcnArchName": "",
}  # fmt: skip


def pretend() -> None:
    """That there is an H200."""
    properties = SimpleNamespace(**H200)
    hints = DeviceProperties(
        "cuda", 0, 132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32,
    )  # fmt: skip
    there: Any = torch
    there._C._cuda_getCurrentRawStream = lambda index: 0
    there.cuda.get_device_properties = lambda device=None: properties
    there.cuda.get_device_capability = lambda device=None: (9, 0)
    there.cuda.device_count = lambda: 1
    there.cuda.current_device = lambda: 0
    there.utils._triton.triton_hash_with_backend = lambda: ""
    there.utils._triton.has_triton = lambda: True
    for owner, name, answer in (
        (DeviceProperties, "create", lambda device: hints),
        (scheduler, "has_triton", lambda: True),
        (joint_graph, "lazy_init", lambda *_: None),
        (post_grad, "lazy_init", lambda *_: None),
        (CudaInterface, "is_available", lambda: True),
        (CudaInterface, "current_device", lambda: 0),
        (CudaInterface, "get_compute_capability", lambda device=None: 90),
        (CudaInterface, "get_device_properties", lambda device=None: properties),
        (CudaInterface.Worker, "get_device_properties", lambda device=None: properties),
        (CudaInterface, "is_bf16_supported", lambda including_emulation=False: True),
        (CudaInterface, "raise_if_triton_unavailable", lambda device=None: None),
    ):
        setattr(owner, name, staticmethod(answer) if isinstance(owner, type) else answer)


def index(given: Any, at: Any) -> Any:
    """``given[at]``."""
    if not isinstance(given, Tensor):
        return given[at]
    at = at if isinstance(at, tuple) else (at,)
    named = sum(one is not None and one is not Ellipsis for one in at)
    found, dim = given, 0
    for one in at:
        if one is Ellipsis:
            dim += given.dim() - named
            continue
        if one is None:
            found = found.unsqueeze(dim)
        elif isinstance(one, slice):
            found = torch.ops.aten.slice(found, dim, one.start, one.stop, one.step or 1)
        elif isinstance(one, Tensor):
            found = torch.ops.aten.index(found, [None] * dim + [one])
        else:
            found, dim = found.select(dim, one), dim - 1
        dim += 1
    return found


def lower(folder: Path, workshop: Path, dtype: torch.dtype) -> Iterator[tuple[Piece, inductor.Written]]:
    """Each piece as it was traced, and its code for ``cuda:0``."""
    described = cold.describe(folder, dtype, None)
    traced = split_model(described.module, described.choice, described.buffers, Stopwatch())
    parts = fuse.fuse(traced, packing=False)
    for plain, moved in zip(parts.unique, move.move(parts, torch.device("cuda", 0)).unique, strict=True):
        graph = fx.GraphModule(moved.graph, copy.deepcopy(moved.graph.graph))
        for node in graph.graph.nodes:
            node.target = index if node.target is operator.getitem else node.target
        graph.recompile()
        yield plain, inductor.write(graph, pieces.example_inputs(graph), workshop)


def compile_kernels(source: str, workshop: Path) -> int:
    """Compile each kernel in ``source`` with its first configuration; how many there are."""
    # Read when they are imported: where things are kept, and what is asked of a driver.
    os.environ |= {"TRITON_CACHE_DIR": str(workshop / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(workshop)}
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    there: Any = triton_helpers
    there.set_driver_to_gpu = lambda: None
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    kernels = [call.args for call in calls if ast.unparse(call.func) == "async_compile.triton"]
    for name, text in (map(ast.literal_eval, arguments) for arguments in kernels):
        kernel = getattr(PyCodeCache.load(text), name)
        assert kernel._precompile_config(kernel.configs[0]) is not None
    return len(kernels)


def differences(piece: Piece, written: inductor.Written, workshop: Path, tokens: int) -> list[float]:
    """How far the results of its code, whose kernels Triton interprets on the CPU, are from those of its graph:
    relative to the largest number."""
    from torch._inductor.runtime import triton_helpers
    from triton import language

    there: Any = torch
    there._C._dynamo.guards._empty_strided_cuda = lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype
    )
    there.cuda._DeviceGuard = lambda index: nullcontext()
    there.cuda.set_device = lambda index: None
    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None
    helpers.libdevice = language.math  # the interpreter has no functions of CUDA's library
    random = torch.Generator().manual_seed(0)
    given = [number(example, tokens, random) for example in pieces.example_inputs(piece.graph)]
    want = piece.graph(*given)
    call = inductor.load(inductor.Generated(written.source, None, written.constants), workshop)
    got = call([one.clone() if isinstance(one, Tensor) else one for one in given])
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]


def number(example: Any, tokens: int, random: torch.Generator) -> Any:
    """Something like ``example``, whose only symbol is the number of tokens, or of rows."""
    if not isinstance(example, Tensor):
        return tokens
    shape, stride = ([_size(one, tokens) for one in sizes] for sizes in (example.shape, example.stride()))
    made = torch.empty_strided(shape, stride, dtype=example.dtype)
    if example.dtype == torch.int64:
        return made.copy_(torch.arange(made.numel()).view(shape) % 4)
    return made.copy_(torch.randn(shape, generator=random))


def _size(size: Any, tokens: int) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))


def main(mode: str, folder: Path, workshop: Path) -> list[dict[str, Any]]:
    told = []
    for piece, written in lower(folder, workshop, torch.bfloat16 if mode == "compile" else torch.float32):
        found: dict[str, Any] = {"name": piece.name, "source": written.source, "cpp": len(written.kernels)}
        if mode == "compile":
            found["triton"] = compile_kernels(written.source, workshop)
        else:
            found["differences"] = [differences(piece, written, workshop, tokens) for tokens in (16, 5)]
        told.append(found)
    return told


if __name__ == "__main__":
    pretend()
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(scratch))) + "\n")
