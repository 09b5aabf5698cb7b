"""What a GPU runner needs of a machine: memory, order of work, and graphs of work that are replayed.

Two machines fit: `compiled.cuda.Cuda`, and `compiled.recording.Recording`, which has a CUDA graph's semantics on CPU
tensors, so that every rule below is kept or broken where a test sees it.
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
    """Captured work: reads and writes the addresses it was captured with, whatever is there at a replay.

    ``results`` are what the function returned. Tensors among them lie in the device's pool. As long as anything holds
    them, no graph that is captured later takes their memory; once nothing does, the next ones may. ``bytes`` is by
    how much the pool grew.
    """

    results: tuple[Any, ...]
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
        """Zeroed host memory that is copied from and to without waiting (``copy_(…, non_blocking=True)``)."""
        ...

    def event(self) -> Event: ...

    def fetch(self, source: Tensor, target: Tensor) -> Event:
        """Copy ``source`` on the device to ``target`` from `host`, without waiting. ``target`` is not read before the
        event returned is synchronized."""
        ...

    def capture(self, function: Function, arguments: Sequence[Any]) -> Graph:
        """Record the work of ``function(list(arguments))``. It runs once or more before that for real, on the given
        arguments, so that it compiles and sets up what it must; it may not wait for the device. All graphs of a device
        share one pool of memory: see `Graph`."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """``tensor``'s memory in the pool under a name that does not hold it."""
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
