"""The physical KV cache: one tensor, page-major over all layers, ``[P, L, 2, S, K, D]``.

A page is one contiguous block, so that it can move as one. Attention sees each layer as two strided
views ``[P, S, K, D]`` with equal strides. The memory starts zeroed: padding reads finite numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled.memory import available_memory
from compiled.step import KVSpec, LoadError

_CACHE_LINE = 64
SHARE_OF_FREE_MEMORY = 0.4
"""Of what is available on a CPU machine, which others use too."""


@dataclass(frozen=True)
class KVShape:
    """The part of the shape that the model and the config give."""

    layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVStore:
    """Owns the memory of ``pages`` pages. ``layers[i]`` are the key and value views of layer i.

    Raises:
        LoadError: there is not as much memory; without a look, it would be missing later, page by page.
    """

    def __init__(self, shape: KVShape, pages: int) -> None:
        needed, free = pages * shape.page_bytes, available_memory()
        if needed > free:
            raise LoadError(f"a KV pool of {pages} pages needs {needed} bytes, {free} are available; lower kv_pages")
        self.spec = KVSpec(pages, shape.page_size, shape.page_bytes, shape.window)
        size = (pages, shape.layers, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self._store = _zeros(pages * shape.page_bytes).view(shape.dtype).view(size)
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (self._store[:, layer, 0], self._store[:, layer, 1]) for layer in range(shape.layers)
        )

    def copy(self, source: int, target: int) -> None:
        """All layers of page ``source`` to page ``target``."""
        self._store[target] = self._store[source]

    def poison(self, pages: Iterable[int]) -> None:
        """Fill ``pages`` with NaN: whatever reads them before it writes them shows."""
        self._store[list(pages)] = torch.nan


def size_pool(shape: KVShape, *, asked: int | None, wanted_tokens: int, max_model_len: int, reserved: int) -> int:
    """How many pages to make, `PADDING_PAGE` included.

    Args:
        asked: the user's number, taken as it is if it can hold one token.
        wanted_tokens: more than this could never be used at once.
        max_model_len: one sequence of this length must fit.
        reserved: bytes that a step needs beside the cache.

    Raises:
        LoadError: with the longest sequence that would fit.
    """
    if asked is not None:
        return asked
    free = max(int(available_memory() * SHARE_OF_FREE_MEMORY) - reserved, 0)
    pages = min(free // shape.page_bytes, 1 + -(-wanted_tokens // shape.page_size))
    if (pages - 1) * shape.page_size < max_model_len:
        raise LoadError(
            f"{free / 2**20:.0f} MiB for KV pages hold {max(pages - 1, 0) * shape.page_size} tokens, "
            f"fewer than max_model_len {max_model_len}; lower max_model_len or free memory"
        )
    return pages


def _zeros(size: int) -> Tensor:
    """``size`` bytes at a cache line's beginning. numpy asks the system for zeroed memory, which it gives page by
    page as they are used; torch would write all of it at once."""
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[begin : begin + size])
