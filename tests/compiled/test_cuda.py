"""What `compiled.gpu.cuda` asks of torch, without a GPU: stand-ins that take only what torch's own functions take."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from compiled.device import Device
from compiled.gpu.cuda import Cuda

NAMES = (
    "CUDAGraph", "Event", "Stream", "current_stream", "graph_pool_handle", "max_memory_allocated", "memory_allocated",
    "memory_reserved", "memory_snapshot", "reset_peak_memory_stats", "set_device", "stream", "synchronize",
)  # fmt: skip


@pytest.fixture
def cuda() -> Iterator[Any]:
    """``torch.cuda``, of which nothing runs."""
    fakes = {name: mock.create_autospec(getattr(torch.cuda, name)) for name in NAMES}
    with mock.patch.multiple(torch.cuda, **fakes):
        fakes["graph_pool_handle"].return_value = (0, 7)
        yield SimpleNamespace(**fakes, graph=fakes["CUDAGraph"].return_value)


def test_graphs_are_captured_into_one_pool_whose_size_is_looked_up_once(cuda: Any) -> None:
    device: Device = Cuda()
    cuda.memory_reserved.side_effect = (100, 164)
    arguments = [2]
    graph, results = device.capture(lambda given: (3 * given.pop(),), arguments)
    assert (graph.bytes, results, arguments) == (64, (6,), [])
    cuda.graph.capture_begin.assert_called_once_with((0, 7), capture_error_mode="thread_local")
    cuda.graph.capture_end.assert_called_once_with()
    graph.replay()
    cuda.graph.replay.assert_called_once_with()
    cuda.memory_snapshot.return_value = [
        {"segment_pool_id": (0, 7), "total_size": 64},
        {"segment_pool_id": (0, 0), "total_size": 1000},
        {"segment_pool_id": (0, 7), "total_size": 32},
    ]
    assert device.pool_bytes() == device.pool_bytes() == 96
    assert cuda.memory_snapshot.call_count == 1


def test_a_capture_that_fails_is_ended_and_its_first_error_is_the_one_that_is_told(cuda: Any) -> None:
    cuda.graph.capture_end.side_effect = RuntimeError("the capture was invalidated")

    def fails(arguments: list[Any]) -> tuple[()]:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        Cuda().capture(fails, [])
    cuda.graph.capture_end.assert_called_once_with()


def test_a_copy_has_an_event_behind_it_and_the_peak_is_of_the_work_alone(cuda: Any) -> None:
    device = Cuda()
    source, target = torch.ones(3), torch.zeros(3)
    event: Any = device.fetch(source, target)
    assert target.tolist() == [1.0, 1.0, 1.0]
    event.record.assert_called_once_with(cuda.current_stream.return_value)
    cuda.memory_allocated.return_value, cuda.max_memory_allocated.return_value = 100, 350
    assert device.peak_of(lambda: None) == 250
