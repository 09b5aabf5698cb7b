"""A device without hardware: CPU tensors, and graphs with the semantics of CUDA's.

What a GPU would do silently shows here. A replay sees addresses, not tensors: memory that was freed, moved or resized
since the capture raises. A replay overwrites all memory of the pool that nothing held when it was captured, because
its kernels may have used that, with `POISON`; its results come last. A host copy that is read, or a source that is
rewritten, before its event was waited for holds poison, or raises.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled import memory
from compiled.device import Function

POISON = 0x7FFF
"""16 bits that make NaN of every float, and of integers an index far outside."""
_LINE = 64
_WAITS = {
    getattr(torch.ops.aten, name)
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
}


class GraphError(RuntimeError):
    """What would have been wrong numbers or an illegal access on a GPU."""


class Recording:
    """See `compiled.device.Device`."""

    name = "recording"

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self._pool: list[_Block] = []
        self._begun = 0
        self._travelling: deque[tuple[int, Callable[[], object]]] = deque()

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def send(self, source: Tensor, target: Tensor) -> "RecordedEvent":
        sent = source.clone()
        target.copy_(sent)

        def arrive() -> None:
            if not torch.equal(sent, source):
                raise GraphError(f"host memory {tuple(source.shape)} was rewritten before it was copied")

        return self._travel(arrive)

    def fetch(self, source: Tensor, target: Tensor) -> "RecordedEvent":
        fetched = source.clone()
        _poison(target)
        return self._travel(lambda: target.copy_(fetched))

    def event(self) -> "RecordedEvent":
        return RecordedEvent(self)

    def capture(self, function: Function, arguments: list[Any]) -> tuple["RecordedGraph", tuple[Any, ...]]:
        """Results that are floats are poison until the first replay. Integers hold values: what is captured next runs
        here and now, and may take them for indices."""
        before = self.pool_bytes()
        inputs = [self._input(argument) for argument in arguments]
        on_device = {_pointer(one) for one in (*arguments, *self._pool) if isinstance(one, Tensor | _Block)}
        with _NoWaiting(on_device):
            made = tuple(function(arguments))
        arguments.clear()
        results, copies = self._keep(made, {_pointer(one) for one in inputs if isinstance(one, _Place)})
        scratch = [block for block in self._pool if not block.held]
        graph = RecordedGraph(function, inputs, [_layout(value) for value in made], copies, scratch)
        graph.bytes = self.pool_bytes() - before
        return graph, results

    def alias(self, tensor: Tensor) -> Tensor:
        block = self._block_of(tensor)
        return tensor if block is None else _over(block.memory, _layout(tensor))

    def synchronize(self) -> None:
        self.finish(self._begun)

    def free_memory(self) -> int:
        return memory.available_memory()

    def pool_bytes(self) -> int:
        return sum(block.memory.numel() for block in self._pool)

    def peak_of(self, work: Callable[[], object]) -> int:
        return memory.peak_of(work)

    def begun(self) -> int:
        """How many copies were begun."""
        return self._begun

    def finish(self, number: int) -> None:
        """End the first ``number`` copies."""
        while self._travelling and self._travelling[0][0] <= number:
            self._travelling.popleft()[1]()

    def _travel(self, arrive: Callable[[], object]) -> "RecordedEvent":
        self._begun += 1
        self._travelling.append((self._begun, arrive))
        event = RecordedEvent(self)
        event.record()
        return event

    def _input(self, value: Any) -> Any:
        return _Place(value, self._block_of(value)) if isinstance(value, Tensor) else value

    def _keep(self, made: Sequence[Any], given: set[int]) -> tuple[tuple[Any, ...], dict[int, "_Block"]]:
        """``made`` as it lies in the pool, and the block of each storage, by the number of the first result in it.
        What lies in memory that was ``given`` stays there."""
        leases: dict[int, Tensor] = {}
        copies: dict[int, _Block] = {}
        results = []
        for number, value in enumerate(made):
            if not isinstance(value, Tensor) or (pointer := _pointer(value)) in given:
                results.append(value)
                continue
            if pointer not in leases:
                copies[number] = block = self._take(value.untyped_storage().nbytes())
                leases[pointer] = block.lease()
                if not value.is_floating_point():
                    block.write(value)
            results.append(_over(leases[pointer], _layout(value)))
        return tuple(results), copies

    def _take(self, size: int) -> "_Block":
        """The smallest free block that holds ``size`` bytes, or a new one."""
        fitting = [block for block in self._pool if not block.held and block.memory.numel() >= size]
        if not fitting:
            fitting.append(_Block(max(1, -(-size // _LINE)) * _LINE))
            self._pool += fitting
        return min(fitting, key=lambda block: block.memory.numel())

    def _block_of(self, tensor: Tensor) -> "_Block | None":
        return next((block for block in self._pool if _pointer(block) == _pointer(tensor)), None)


class RecordedEvent:
    """See `compiled.device.Event`."""

    def __init__(self, device: Recording) -> None:
        self._device = device
        self._number = 0

    def record(self) -> None:
        self._number = self._device.begun()

    def synchronize(self) -> None:
        self._device.finish(self._number)


class RecordedGraph:
    """See `compiled.device.Graph`."""

    bytes = 0

    def __init__(
        self,
        function: Function,
        inputs: Sequence[Any],
        layouts: Sequence[Any],
        copies: dict[int, "_Block"],
        scratch: Sequence["_Block"],
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._layouts = layouts
        self._copies = copies
        self._scratch = scratch

    def replay(self) -> None:
        made = tuple(self._function([one.tensor() if isinstance(one, _Place) else one for one in self._inputs]))
        if (layouts := [_layout(value) for value in made]) != self._layouts:
            raise GraphError(f"a captured function returned {self._layouts}, now it returns {layouts}")
        for block in self._scratch:
            _poison(block.memory)
        for number, block in self._copies.items():
            block.write(made[number])


class _Block:
    """Memory of the pool. It is held as long as a tensor over its `lease` lives."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self._lease: Callable[[], object] = lambda: None

    @property
    def held(self) -> bool:
        return self._lease() is not None

    def lease(self) -> Tensor:
        """All of it, poisoned."""
        _poison(self.memory)
        lent = (ctypes.c_uint8 * self.memory.numel()).from_address(self.memory.data_ptr())
        self._lease = weakref.ref(lent)
        return torch.frombuffer(lent, dtype=torch.uint8)

    def write(self, value: Tensor) -> None:
        """The whole memory in which ``value`` lies."""
        fresh = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        _poison(self.memory)
        self.memory[: fresh.numel()].copy_(fresh)


class _Place:
    """Where a captured tensor lies: in a ``block`` of the pool, which stays, or in memory that is watched."""

    def __init__(self, tensor: Tensor, block: _Block | None) -> None:
        storage = tensor.untyped_storage()
        self._layout = _layout(tensor)
        self._block = block
        self._storage = None if block else StorageWeakRef(storage)
        self._size = storage.nbytes()
        self.pointer = storage.data_ptr()

    def tensor(self) -> Tensor:
        """What lies there now."""
        if self._block is not None:
            return _over(self._block.memory, self._layout)
        assert self._storage is not None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise GraphError(f"memory of {self._layout} was freed after it was captured")
        if (storage.data_ptr(), storage.nbytes()) != (self.pointer, self._size):
            raise GraphError(f"memory of {self._layout} was moved or resized after it was captured")
        return _over(storage, self._layout)


class _NoWaiting(TorchDispatchMode):
    """Refuses what would wait for the device, of numbers that are its own: in the memory ``on_device`` or computed."""

    def __init__(self, on_device: set[int]) -> None:
        super().__init__()
        self._on_device = on_device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [_pointer(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func.overloadpacket in _WAITS and not self._on_device.isdisjoint(operands):
            raise GraphError(f"{func} waits for the device, which is not possible while a graph is captured")
        made = func(*args, **(kwargs or {}))
        fresh = {_pointer(one) for one in tree_leaves(made) if isinstance(one, Tensor)}
        self._on_device |= fresh - set(operands)
        return made


def _pointer(one: "Tensor | _Block | _Place") -> int:
    if isinstance(one, _Place):
        return one.pointer
    return (one.memory if isinstance(one, _Block) else one).untyped_storage().data_ptr()


def _layout(value: Any) -> Any:
    """What a graph has baked in: of a tensor all but its numbers, of others the value."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def _over(memory: "Tensor | torch.UntypedStorage", layout: Any) -> Tensor:
    """A tensor of ``layout`` in ``memory``."""
    dtype, shape, stride, offset = layout
    storage = memory.untyped_storage() if isinstance(memory, Tensor) else memory
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _poison(memory: Tensor) -> None:
    memory_bytes = memory.view(-1).view(torch.uint8)
    memory_bytes[0::2], memory_bytes[1::2] = POISON & 0xFF, POISON >> 8
