"""``streamengine::linear``: a linear layer whose weight was packed beforehand, as an operator of torch.

Owns the packed layout (see ``product.h``) and the operator's schema, so that graphs with it can be traced and
compiled before the kernel is there; `load_kernel` gives it one on the CPU. Each result is summed in float32, in
the order of the inputs: a row has the same bits whatever rows are computed with it and on any number of threads.
"""

import ctypes
import math
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compiled.native import FLAGS, load_library

PANEL = 32
"""Outputs that are packed side by side; mirrors ``kPanel`` in the kernel."""

DTYPES = (torch.float32, torch.bfloat16)

_LINE = 64
_CHUNK = 64 << 20
"""Bytes that are asked of the system at once; what is never used of them is never there."""

_HERE = Path(__file__).parent
_SHARED = _HERE.parent / "attention"
_SOURCES = (_HERE / "linear.cpp", _HERE / "function.h", _HERE / "product.h", _SHARED / "formats.h", _SHARED / "simd.h")

torch.library.define("streamengine::linear", "(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


@torch.library.register_fake("streamengine::linear")
def _(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


linear: Callable[[Tensor, Tensor, Tensor | None, int], Tensor] = torch.ops.streamengine.linear.default
"""What compiled pieces call: the operator, and once its kernel is there the same without torch's dispatcher, which
costs a decoding step of a small model a twentieth of its time. CPU tensors only."""


@cache
def load_kernel(folder: Path | None = None, flags: Sequence[str] = FLAGS) -> None:
    """Give ``streamengine::linear`` its kernel, compiled first if ``folder`` does not have it (see `compiled.native`).

    Raises `compiled.native.KernelUnavailable`.
    """
    torch_folder = Path(torch.__file__).parent
    includes = (f"-I{torch_folder / 'include'}", f"-I{sysconfig.get_path('include')}")
    library = load_library(_SOURCES, folder, flags=(*flags, *includes, f"-L{torch_folder / 'lib'}", "-ltorch_cpu"))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, *(ctypes.py_object,) * 4)(
        ctypes.cast(library.linear_function, ctypes.c_void_p).value or 0
    )
    guards = torch._C._dynamo.guards  # what Inductor's own kernels are called with
    global linear
    linear = make(
        guards._torchinductor_pyobject_tensor_data_ptr,
        torch.ops.streamengine.linear.default,
        guards._empty_strided_cpu,
        *DTYPES,
    )


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Of the packed weight: panels, words of inputs, outputs in a panel, inputs in a word of 32 bits."""
    word = 4 // dtype.itemsize
    return -(-out_features // PANEL), -(-in_features // word), PANEL, word


class Arena:
    """Memory for packed weights, which lie in it as they come: one behind the other.

    Weights in the order of a step are read as one stream, so what is fetched ahead of a product's end is the next
    one's beginning. Chunks are numpy's, because it asks the system for large pages and torch does not.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that begins at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        if self._skip() + size > len(self._free):
            self._free = torch.from_numpy(np.empty(max(size, _CHUNK) + _LINE, np.uint8))
        begin = self._skip()
        taken, self._free = self._free[begin : begin + size], self._free[begin + size :]
        return taken.view(dtype).view(shape)

    def _skip(self) -> int:
        return -self._free.data_ptr() % _LINE


def pack(weight: Tensor, arena: Arena | None = None) -> Tensor:
    """``weight [N, K]`` in the layout of the kernel: a new tensor of the same size, but for padding with zeros."""
    outputs, inputs = weight.shape
    panels, words, _, word = shape = packed_shape(outputs, inputs, weight.dtype)
    padded = torch.nn.functional.pad(weight, (0, words * word - inputs, 0, panels * PANEL - outputs))
    as_words = padded.contiguous().view(torch.int32).view(panels, PANEL, words)
    packed = torch.empty(shape, dtype=weight.dtype) if arena is None else arena.take(shape, weight.dtype)
    packed.view(torch.int32).view(panels, words, PANEL).copy_(as_words.transpose(1, 2))
    return packed


def packed_rows(packed: Tensor, rows: Tensor, in_features: int) -> Tensor:
    """Rows ``rows`` [...] of the weight that was packed, as ``[..., K]``: an embedding tied to an LM head."""
    found = packed[rows // PANEL, :, rows % PANEL]
    return found.flatten(-2)[..., :in_features]
