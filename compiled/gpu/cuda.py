"""The device of a CUDA GPU: torch's default stream, and graphs captured on one beside it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from compiled.device import Function


class Cuda:
    """See `compiled.device.Device`. ``index`` counts the GPUs that are visible."""

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._beside = torch.cuda.Stream(self.torch)
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes: int | None = 0

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        return self._copy(source, target)

    def fetch(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        return self._copy(source, target)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def capture(self, function: Function, arguments: list[Any]) -> tuple["CudaGraph", tuple[Any, ...]]:
        """torch's own ``torch.cuda.graph`` also empties the allocator's cache, at each of hundreds of captures."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self.torch)
        self._beside.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(self._beside):
            # Other threads may use the device meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                made = tuple(function(arguments))
            except BaseException:
                with suppress(RuntimeError):  # what is broken cannot be ended; the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
        arguments.clear()
        self._pool_bytes = None
        return CudaGraph(graph, torch.cuda.memory_reserved(self.torch) - before), made

    def alias(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        raw = torch.as_tensor(_Memory(tensor.data_ptr(), extent * tensor.itemsize), device=self.torch)
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch)[0]

    def pool_bytes(self) -> int:
        """Looked up again after a capture only: it takes milliseconds."""
        if self._pool_bytes is None:
            segments = torch.cuda.memory_snapshot()
            ours = (segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(self._pool))
            self._pool_bytes = sum(segment["total_size"] for segment in ours)
        return self._pool_bytes

    def peak_of(self, work: Callable[[], object]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch) - before

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch))
        return event


class CudaGraph:
    """See `compiled.device.Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, grown: int) -> None:
        self.bytes = grown
        self.replay = graph.replay


class _Memory:
    """Bytes at an address, for torch to look at without holding what lies there."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
