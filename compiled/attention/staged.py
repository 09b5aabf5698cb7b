"""A plan's tables on an accelerator: one block of memory, and one copy to it a step, which nobody waits for.

```
pages i64 [T] | slots i64 [T] | kv_indptr i32 [R + 1] | kv_last_page_len i32 [R] | kv_indices i32 [N]
```
Pages and slots take an even number of places, so that both begin where vectors may be loaded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled.attention.tables import Plan, positions
from compiled.device import Device


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

    def write(self, plan: Plan, page_size: int) -> None:
        """``plan``'s tables, into a block in host memory."""
        pages, slots = positions(plan, page_size)
        for target, source in (
            (self.pages, pages),
            (self.slots, slots),
            (self.kv_indptr, plan.kv_indptr),
            (self.kv_last_page_len, plan.kv_last_page_len),
            (self.kv_indices, plan.kv_indices),
        ):
            target.copy_(source)


class Stage:
    """The block of one kind of step. It lies where it lay before for as many tokens and rows, unless it has grown.

    What the host writes is one of two blocks in turns, because the one before may still be under way.
    """

    def __init__(self, device: Device, *, tokens: int = 0, rows: int = 0, indices: int = 0) -> None:
        """With room for so much; with any number given nothing grows: a graph has the addresses."""
        self._device = device
        self._may_grow = not rows
        self._latest: tuple[Plan, Staged] | None = None
        self._turn = 0
        self._allocate(_size(tokens, rows, indices))

    def _allocate(self, size: int) -> None:
        self._block = torch.zeros(size, dtype=torch.uint8, device=self._device.torch)
        self._hosts = [self._device.host((size,), torch.uint8) for _ in range(2)]
        self._sent = [self._device.event() for _ in range(2)]

    def put(self, plan: Plan, page_size: int) -> Staged:
        """``plan``'s tables, on the device when its work gets there. The same plan is copied once only."""
        if self._latest is not None and plan is self._latest[0]:
            return self._latest[1]
        self._latest = None
        size = _size(plan.tokens, plan.rows, plan.kv_indices.numel())
        if size > self._block.numel():
            if not self._may_grow:
                raise ValueError(f"a plan of {size} bytes in a block of {self._block.numel()}")
            self._allocate(2 * size)
        self._turn ^= 1
        host = self._hosts[self._turn]
        self._sent[self._turn].synchronize()
        _cut(host, plan).write(plan, page_size)
        self._sent[self._turn] = self._device.send(host[:size], self._block[:size])
        staged = _cut(self._block, plan)
        self._latest = plan, staged
        return staged


def _size(tokens: int, rows: int, indices: int) -> int:
    return 16 * _even(tokens) + 4 * (2 * rows + 1 + indices)


def _even(tokens: int) -> int:
    return tokens + tokens % 2


def _cut(block: Tensor, plan: Plan) -> Staged:
    tokens, even, rows = plan.tokens, _even(plan.tokens), plan.rows
    places, tables = block[: 16 * even].view(torch.int64), block[16 * even :].view(torch.int32)
    room = tables[2 * rows + 1 :]
    return Staged(
        pages=places[:tokens],
        slots=places[even : even + tokens],
        kv_indptr=tables[: rows + 1],
        kv_last_page_len=tables[rows + 1 : 2 * rows + 1],
        kv_indices=room[: plan.kv_indices.numel()],
        room=room,
    )
