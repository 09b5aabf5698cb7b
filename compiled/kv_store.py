"""The physical KV cache: one block of bytes a page, which holds all layers' keys and values of its slots.

So a page can move as one. Within it layer i has keys ``[S, K, D]`` and values ``[S, K, E]``, each from a cache line's
beginning; on a CPU, whose kernel walks one head after the other, they lie as ``[K, S, D]`` and ``[K, S, E]``. Attention
sees them as strided views over all pages. Layers may differ in K, D and E. The memory starts zeroed: padding reads
finite numbers.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from compiled.device import Device
from compiled.memory import available_memory
from compiled.step import KVMemory, KVSpec, LoadError

_CACHE_LINE = 64

MEMFD = "streamengine-kv"
"""Name of a shared cache's memfd, for ``/proc``."""

SHARE_OF_FREE_MEMORY = 0.4
"""Of what is available on a CPU machine, which others use too."""

SHARE_OF_DEVICE_MEMORY = 0.92
"""Of what is free on a GPU once all else is there: allocators lose some of it between their blocks."""


@dataclass(frozen=True)
class LayerShape:
    """K, D and E of one layer."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class KVShape:
    """The part of the shape that the model and the config give. ``window`` is the one that all layers share."""

    layers: tuple[LayerShape, ...]
    page_size: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """Keys of layer 0, values of layer 0, keys of layer 1, …: heads, size and offset in the page's bytes."""
        blocks, offset = [], 0
        for layer in self.layers:
            for size in (layer.head_dim, layer.value_dim):
                blocks.append((layer.num_kv_heads, size, offset))
                offset += _lines(self.page_size * layer.num_kv_heads * size * self.dtype.itemsize)
        return tuple(blocks)

    @property
    def layout(self) -> str:
        """Heads and sizes of keys and values, of each run of equal layers: ``30 of 3 x (64 + 64)``."""
        runs = ((layer, len(list(run))) for layer, run in groupby(self.layers))
        return ", ".join(f"{n} of {one.num_kv_heads} x ({one.head_dim} + {one.value_dim})" for one, n in runs)

    @property
    def page_bytes(self) -> int:
        heads, size, offset = self.blocks[-1]
        return offset + _lines(self.page_size * heads * size * self.dtype.itemsize)


class KVStore:
    """Owns the memory of ``pages`` pages, on ``device`` (None: the CPU). ``layers[i]`` are the key and value views of
    layer i.

    Args:
        shared: lay it in a memfd, which other processes can map: it lives until the last of them lets go of it.

    Raises:
        LoadError: there is not as much memory; without a look, it would be missing later, page by page.
    """

    def __init__(self, shape: KVShape, pages: int, device: Device | None = None, *, shared: bool = False) -> None:
        needed = pages * shape.page_bytes
        free = available_memory() if device is None else device.free_memory()
        if needed > free:
            raise LoadError(f"a KV pool of {pages} pages needs {needed} bytes, {free} are available; lower kv_pages")
        dtype = str(shape.dtype).removeprefix("torch.")
        self.spec = KVSpec(
            pages, shape.page_size, shape.page_bytes, shape.window, dtype, len(shape.layers), shape.layout
        )
        where = torch.device("cpu") if device is None else device.torch
        self._descriptor: int | None = None
        if where.type != "cpu":
            whole = torch.zeros(needed, dtype=torch.uint8, device=where)
        elif shared:
            self._descriptor = os.memfd_create(MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self._descriptor)
            os.ftruncate(self._descriptor, needed)
            # Whoever maps it could be killed by its shrinking.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            whole = torch.frombuffer(mmap.mmap(self._descriptor, needed), dtype=torch.uint8)
        else:
            whole = _zeros(needed)
        self._store = whole.view(pages, shape.page_bytes)
        store = self._store.view(shape.dtype)
        views = []
        for heads, size, offset in shape.blocks:
            block = store[:, offset // shape.dtype.itemsize :][:, : shape.page_size * heads * size]
            if device is None:
                views.append(block.view(pages, heads, shape.page_size, size).transpose(1, 2))
            else:
                views.append(block.view(pages, shape.page_size, heads, size))
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(views[::2], views[1::2], strict=True))

    def memory(self) -> KVMemory | None:
        """See `compiled.step.Runner.kv_memory`."""
        if self._store.device.type != "cpu":
            return None
        view = self._store.numpy().reshape(-1).data
        return KVMemory(view, self.spec.pages, self.spec.page_bytes, self._descriptor)

    def copy(self, source: int, target: int) -> None:
        """All layers of page ``source`` to page ``target``."""
        self._store[target] = self._store[source]

    def poison(self, pages: Iterable[int]) -> None:
        """Fill ``pages`` with NaN: whatever reads them before it writes them shows."""
        self._store[list(pages)] = 0xFF  # NaN in every type of float


def size_pool(
    shape: KVShape, *, asked: int | None, wanted_tokens: int, max_model_len: int, free: int, reserved: int
) -> int:
    """How many pages to make, `PADDING_PAGE` included.

    Args:
        asked: the user's number, taken as it is if it can hold one token.
        wanted_tokens: more than this could never be used at once.
        max_model_len: one sequence of this length must fit.
        free: bytes that may be used, of which so many are ``reserved`` for what a step needs beside the cache.

    Raises:
        LoadError: with the longest sequence that would fit.
    """
    if asked is not None:
        return asked
    free = max(free - reserved, 0)
    pages = min(free // shape.page_bytes, 1 + -(-wanted_tokens // shape.page_size))
    if (pages - 1) * shape.page_size < max_model_len:
        raise LoadError(
            f"{free / 2**20:.0f} MiB for KV pages hold {max(pages - 1, 0) * shape.page_size} tokens, "
            f"fewer than max_model_len {max_model_len}; lower max_model_len or free memory"
        )
    return pages


def _lines(size: int) -> int:
    """``size`` rounded up to whole cache lines."""
    return -(-size // _CACHE_LINE) * _CACHE_LINE


def _zeros(size: int) -> Tensor:
    """``size`` bytes at a cache line's beginning. numpy asks the system for zeroed memory, which it gives page by
    page as they are used; torch would write all of it at once."""
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[begin : begin + size])
