"""A plan's tables on an accelerator: one block of memory, and one copy to it a step, which nobody waits for.

```
pages i64 [T] | slots i64 [T] | kv_indptr i32 [R + 1] | kv_last_page_len i32 [R] | kv_indices i32 [N]
```
Pages and slots take an even number of places, so that both begin where vectors may be loaded.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiled.attention.tables import Plan, positions
from compiled.device import Device

_FIRST_BYTES = 1 << 20
"""Few steps are larger: 16 rows of 200,000 positions, or 60,000 tokens of prompts."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Views of the block. Token ``t`` of the step is written to slot ``slots[t]`` of page ``pages[t]``; ``room`` is
    ``kv_indices`` and what is free behind it."""

    pages: Tensor
    slots: Tensor
    kv_indptr: Tensor
    kv_last_page_len: Tensor
    kv_indices: Tensor
    room: Tensor


class Stage:
    """The block of one kind of step. It lies where it lay before for as many tokens and rows, unless it has grown.

    What the host writes is one of two blocks in turns, because the one before may still be under way.
    """

    def __init__(self, device: Device, *, tokens: int = 0, rows: int = 0, indices: int = 0) -> None:
        """With room for so much and no more: a graph has the addresses. Without a number it grows with its steps."""
        self._device = device
        self._may_grow = not rows
        self._latest: tuple[Plan, Staged] | None = None
        self._turn = 0
        self._allocate(_size(tokens, rows, indices) if rows else _FIRST_BYTES)

    def _allocate(self, size: int) -> None:
        self._block = torch.zeros(size, dtype=torch.uint8, device=self._device.torch)
        self._hosts = [self._device.host((size,), torch.uint8) for _ in range(2)]
        self._sent = [self._device.event() for _ in range(2)]
        self._views: tuple[tuple[int, int], Staged] | None = None

    def put(self, plan: Plan, page_size: int) -> Staged:
        """``plan``'s tables, on the device when its work gets there. The same plan is copied once only."""
        if self._latest is not None and plan is self._latest[0]:
            return self._latest[1]
        self._latest = None
        indices = plan.kv_indices.numel()
        size = _size(plan.tokens, plan.rows, indices)
        if size > self._block.numel():
            if not self._may_grow:
                raise ValueError(f"a plan of {size} bytes in a block of {self._block.numel()}")
            self._allocate(2 * size)
        self._turn ^= 1
        host = self._hosts[self._turn]
        self._sent[self._turn].synchronize()
        _write(host.numpy(), plan, page_size)
        self._sent[self._turn] = self._device.send(host[:size], self._block[:size])
        views = self._views_of(plan.tokens, plan.rows)
        staged = replace(views, kv_indices=views.room[:indices])
        self._latest = plan, staged
        return staged

    def holds(self, plan: Plan) -> bool:
        """Whether ``plan`` was the last one put."""
        return self._latest is not None and plan is self._latest[0]

    def _views_of(self, tokens: int, rows: int) -> Staged:
        if self._views is None or self._views[0] != (tokens, rows):
            even = _even(tokens)
            places, tables = self._block[: 16 * even].view(torch.int64), self._block[16 * even :].view(torch.int32)
            room = tables[2 * rows + 1 :]
            indptr, last = tables[: rows + 1], tables[rows + 1 : 2 * rows + 1]
            staged = Staged(places[:tokens], places[even : even + tokens], indptr, last, room, room)
            self._views = (tokens, rows), staged
        return self._views[1]


def _write(host: npt.NDArray[np.uint8], plan: Plan, page_size: int) -> None:
    tokens, even, rows = plan.tokens, _even(plan.tokens), plan.rows
    places, tables = host[: 16 * even].view(np.int64), host[16 * even :].view(np.int32)
    places[:tokens], places[even : even + tokens] = positions(plan, page_size)
    tables[: rows + 1] = plan.kv_indptr.numpy()
    tables[rows + 1 : 2 * rows + 1] = plan.kv_last_page_len.numpy()
    tables[2 * rows + 1 :][: plan.kv_indices.numel()] = plan.kv_indices.numpy()


def _size(tokens: int, rows: int, indices: int) -> int:
    return 16 * _even(tokens) + 4 * (2 * rows + 1 + indices)


def _even(tokens: int) -> int:
    return tokens + tokens % 2
