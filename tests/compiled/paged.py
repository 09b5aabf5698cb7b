"""Paged batches for the attention tests: rows of (query tokens, positions) over shuffled, poisoned pages."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled.attention.base import FP8, Attention, AttentionSpec, encode

LAYERS, LAYER = 3, 1
SCALES = [(0.25, 2.0), (0.03, 0.02), (1.0, 1.0)]
"""Of a float8 cache, by layer."""


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Batch:
    """One step. ``cache`` [P, L, S * K * (D + E)] holds every row's earlier positions and ``poison`` everywhere else.

    With a ``window`` positions that no token of the row sees are poison too, and page 0 stands for whole pages of
    them. With ``float8`` the cache is of that type, with `SCALES`.
    """

    rows: list[tuple[int, int]]
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    padding: int = 0
    seed: int = 0
    window: int | None = None
    value_dim: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = field(init=False, default=None)
    with_sinks: bool = False
    float8: bool = False
    poison: float = math.nan
    pages: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        counts = [math.ceil(positions / self.page_size) for _, positions in self.rows]
        shuffled = (torch.randperm(sum(counts) + 2, generator=random) + 1).tolist()  # never page 0, some unused
        self.pages = [[shuffled.pop() for _ in range(count)] for count in counts]
        slots, size = self.page_size * self.kv_heads, self.value_dim or self.head_dim
        shape = (sum(counts) + 4, LAYERS, slots * (self.head_dim + size))
        self.cache = torch.full(shape, self.poison, dtype=self.dtype).to(FP8 if self.float8 else self.dtype)
        # Every row's keys and values by position: what a chunk, a batch mate or SDPA would see.
        self.keys = [self._normal(random, n, self.kv_heads, self.head_dim) for _, n in self.rows]
        self.values = [self._normal(random, n, self.kv_heads, size) for _, n in self.rows]
        self.queries = [self._normal(random, n, self.heads, self.head_dim) for _, n in self.rows]
        if self.with_sinks:
            self.sinks = 2 * self._normal(random, self.heads)
        keys, values = self.views(self.cache)[LAYER]
        for row, (tokens, positions) in enumerate(self.rows):
            page, slot = self.slots(row)
            past = slice(self.unseen(row), positions - tokens)
            for cache, of_row, scale in zip((keys, values), (self.keys, self.values), SCALES[LAYER], strict=True):
                cache[page[past], slot[past]] = encode(of_row[row][past], cache.dtype, scale)
            gone = self.unseen(row) // self.page_size
            self.pages[row][:gone] = [0] * gone

    def _normal(self, random: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(self.dtype)

    def unseen(self, row: int) -> int:
        """How many of a row's first positions lie outside of its first token's window."""
        tokens, positions = self.rows[row]
        return 0 if self.window is None else max(0, positions - tokens + 1 - self.window)

    def slots(self, row: int) -> tuple[Tensor, Tensor]:
        """Page and slot of each of a row's positions."""
        positions = torch.arange(self.rows[row][1])
        return torch.tensor(self.pages[row])[positions // self.page_size], positions % self.page_size

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.window,
            self.value_dim,
            self.soft_cap,
            self.sinks is not None,
        )

    def views(self, cache: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys [P, S, K, D] and values [P, S, K, E] in ``cache``."""
        shape = (len(cache), self.page_size, self.kv_heads)
        cut = self.page_size * self.kv_heads * self.head_dim
        layers = cache.unbind(1)
        return [(layer[:, :cut].view(*shape, -1), layer[:, cut:].view(*shape, -1)) for layer in layers]

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Attention.plan` takes."""
        return (
            int32([0, *itertools.accumulate(tokens for tokens, _ in self.rows)]),
            int32([0, *itertools.accumulate(len(pages) for pages in self.pages)]),
            int32([page for pages in self.pages for page in pages]),
            int32([(positions - 1) % self.page_size + 1 for _, positions in self.rows]),
        )

    @property
    def options(self) -> dict[str, Any]:
        """What a backend is told of a float8 cache."""
        return {"dtype": self.dtype, "scales": SCALES} if self.float8 else {}

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the step's tokens, then of ``padding`` tokens of NaN."""
        return self._of_step(self.queries), self._of_step(self.keys), self._of_step(self.values)

    def _of_step(self, rows: list[Tensor]) -> Tensor:
        padding = torch.full((self.padding, *rows[0].shape[1:]), math.nan, dtype=self.dtype)
        return torch.cat([*(row[n - tokens :] for row, (tokens, n) in zip(rows, self.rows, strict=True)), padding])

    def run(self, backend: type[Attention], **options: Any) -> tuple[Tensor, Tensor]:
        """(out, cache afterwards), leaving ``self.cache`` as it was."""
        cache = self.cache.clone()
        attention = backend(self.spec, self.views(cache), **self.options, **options)
        attention.plan(*self.tables)
        q, k, v = self.operands()
        out = q.new_full((*q.shape[:2], v.shape[2]), math.nan)
        attention.run(q, k, v, LAYER, out, self.sinks)
        return out, cache
