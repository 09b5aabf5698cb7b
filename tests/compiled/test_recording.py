"""The recording device shows what a GPU with CUDA graphs would do wrong without a word."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled.device import Device
from compiled.gpu.recording import GraphError, Recording


def double(arguments: list[Any]) -> tuple[Tensor]:
    (x,) = arguments
    return (x * 2,)


def test_a_graph_runs_again_on_what_lies_at_its_addresses() -> None:
    device: Device = Recording()
    x = torch.tensor([1.0, 2.0])
    graph, (y,) = device.capture(double, [x])
    assert y.isnan().all(), "nothing has run yet"
    graph.replay()
    assert y.tolist() == [2.0, 4.0]
    x.copy_(torch.tensor([3.0, 4.0]))
    assert y.tolist() == [2.0, 4.0]
    graph.replay()
    assert y.tolist() == [6.0, 8.0], "the same memory, overwritten"


def test_an_input_that_was_freed_or_resized_is_not_replayed() -> None:
    device = Recording()
    x, y = torch.ones(4), torch.ones(4)
    of_x, _ = device.capture(double, [x[:2]])
    of_y, _ = device.capture(double, [y])
    of_x.replay()
    del x
    with pytest.raises(GraphError, match="was freed"):
        of_x.replay()
    y.resize_(4000)
    with pytest.raises(GraphError, match="moved or resized"):
        of_y.replay()


def test_memory_that_nothing_held_at_a_capture_is_overwritten_by_its_replays() -> None:
    device = Recording()
    x = torch.ones(8)
    first, (held,) = device.capture(double, [x])
    second, (let_go,) = device.capture(double, [x])
    let_go = device.alias(let_go)
    size = device.pool_bytes()
    third, (reused,) = device.capture(double, [x])
    assert device.pool_bytes() == size, "its result lies where the second's was"
    first.replay()
    second.replay()
    assert held.tolist() == let_go.tolist() == [2.0] * 8
    reused = device.alias(reused)
    fourth, _ = device.capture(lambda _: (), [])
    fourth.replay()
    assert held.tolist() == [2.0] * 8
    assert let_go.isnan().all()
    assert reused.isnan().all()
    third.replay()
    assert let_go.tolist() == [2.0] * 8, "the third's result, under the second's name"


def test_results_may_be_views_of_one_memory_or_of_an_input_and_numbers() -> None:
    device = Recording()
    x = torch.arange(6.0)

    def work(arguments: list[Any]) -> tuple[Any, ...]:
        x, rows = arguments
        made = x.view(rows, -1) + 1
        return made, made[:, 1:], made.t(), x[2:], rows

    graph, (made, part, turned, view, rows) = device.capture(work, [x, 2])
    assert (graph.bytes, device.pool_bytes()) == (64, 64), "one line of memory for all three"
    graph.replay()
    assert made.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert part.tolist() == [[2.0, 3.0], [5.0, 6.0]]
    assert turned.is_set_to(made.t())
    assert view.data_ptr() == x[2:].data_ptr()
    assert rows == 2


def test_waiting_for_the_device_is_refused_while_capturing() -> None:
    device = Recording()
    host = torch.tensor([3])

    def waits(arguments: list[Any]) -> tuple[Tensor]:
        return (arguments[0] * int(arguments[0].sum()),)

    def does_not(arguments: list[Any]) -> tuple[Tensor]:
        return (arguments[0] * int(host[0]),)

    with pytest.raises(GraphError, match="waits for the device"):
        device.capture(waits, [torch.ones(2)])
    device.capture(does_not, [torch.ones(2)])


def test_a_function_that_returns_other_shapes_than_it_did_cannot_be_replayed() -> None:
    device = Recording()
    sizes = iter([2, 3])
    graph, _ = device.capture(lambda _: (torch.ones(next(sizes)),), [])
    with pytest.raises(GraphError, match=r"returned .*\(2,\).* now it returns .*\(3,\)"):
        graph.replay()


def test_a_copy_to_the_host_is_there_when_its_event_was_waited_for() -> None:
    device = Recording()
    source, target = torch.tensor([1, 2]), device.host((2,), torch.int64)
    event = device.fetch(source, target)
    source.zero_()
    assert int(target.min()) > 1 << 60, "poison"
    event.synchronize()
    assert target.tolist() == [1, 2]
    device.fetch(source, target)
    later = device.event()
    later.record()
    later.synchronize()
    assert target.tolist() == [0, 0], "all that was begun before an event is done behind it"


def test_host_memory_that_is_rewritten_before_it_was_copied_shows() -> None:
    device = Recording()
    source, target = device.host((2,), torch.int64), torch.empty(2, dtype=torch.int64)
    device.send(source, target).synchronize()
    source += 1
    device.send(source, target)
    assert target.tolist() == [1, 1]
    source += 1
    with pytest.raises(GraphError, match="rewritten before it was copied"):
        device.synchronize()
