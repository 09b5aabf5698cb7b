"""What a GPU runner needs of a machine: memory, order of work, and graphs of work that are replayed.

Two machines fit: `compiled.gpu.cuda.Cuda`, and `compiled.gpu.recording.Recording`, which has a CUDA graph's semantics
on CPU tensors, so that every rule below is kept or broken where a test sees it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Function = Callable[[list[Any]], Sequence[Any]]
"""A compiled piece: takes its arguments out of the list that it is given."""


class Event(Protocol):
    """A point in the order of the device's work."""

    def record(self) -> None:
        """Put it behind all work that was given to the device until now."""
        ...

    def synchronize(self) -> None:
        """Block until the work before it is done."""
        ...


class Graph(Protocol):
    """Captured work: reads and writes the addresses it was captured with, whatever is there at a replay. ``bytes`` is
    by how much its capture made the pool grow."""

    bytes: int

    def replay(self) -> None:
        """Do the work again, behind all that was given to the device before."""
        ...


class Device(Protocol):
    """One accelerator and its one stream of work: everything given to it happens in that order, but not at once.

    ``name`` is "cuda" or "recording", ``torch`` where its tensors are.
    """

    name: str
    torch: torch.device

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory for `send` and `fetch`."""
        ...

    def send(self, source: Tensor, target: Tensor) -> Event:
        """Copy ``source`` from `host` to ``target`` on the device, without waiting. ``source`` is not written before
        the event returned is synchronized."""
        ...

    def fetch(self, source: Tensor, target: Tensor) -> Event:
        """Copy ``source`` on the device to ``target`` from `host`, without waiting. ``target`` is not read before the
        event returned is synchronized."""
        ...

    def event(self) -> Event: ...

    def capture(self, function: Function, arguments: list[Any]) -> tuple[Graph, tuple[Any, ...]]:
        """Record what ``function(arguments)`` gives the device to do, and what it returns; it may not wait for the
        device, and has run before, so that whatever it compiles or sets up is there.

        Nothing is done yet: results hold no values before the first replay. They lie in the pool that all graphs of
        the device share, in memory that no graph captured later takes while anything holds them; once nothing does,
        later ones may, and then overwrite it at each of their replays.
        """
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """The memory of ``tensor``, a result of `capture`, under a name that does not hold it."""
        ...

    def synchronize(self) -> None:
        """Block until all work is done."""
        ...

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def pool_bytes(self) -> int:
        """Size of the pool that all graphs share."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Most bytes that ``work`` held at once, beyond what was held before."""
        ...
