"""How FlashInfer's wrappers are used, seen from below: run by test_flashinfer.py, over `tests.compiled.emulation`."""

from collections.abc import Callable
from typing import Any

import flashinfer
import pytest
import torch
from torch import Tensor

from compiled.attention.base import AttentionSpec
from compiled.attention.flashinfer import FlashInferAttention, Workspace
from compiled.attention.layers import ModelAttention
from compiled.gpu.recording import RecordedEvent, Recording
from tests.compiled.backends import Backend, backend_of
from tests.compiled.emulation import LOADED, Module
from tests.compiled.paged import LAYER, Batch
from tests.compiled.test_conformance import BF16, InGraph, small


@pytest.fixture(autouse=True)
def backend() -> Backend:
    LOADED.clear()
    flashinfer.prefill.get_batch_prefill_module.cache_clear()
    return backend_of("flashinfer")


def batch(rows: list[tuple[int, int]], **shape: Any) -> Batch:
    return Batch(rows, 8, 2, 64, dtype=BF16, poison=0.0, **shape)


def module() -> Module:
    """The only one that was loaded."""
    (only,) = LOADED.values()
    return only


def test_one_module_serves_prefill_decoding_and_graphs(backend: Backend) -> None:
    backend.run(batch([(1, 20), (5, 30)]))
    graph = InGraph(backend, 2, [batch([(1, 20), (1, 40)])])
    graph.capture()
    graph.plan(batch([(1, 20), (1, 40)]))
    graph.replay()
    assert "use_swa_False_use_logits_cap_False" in module().name
    assert len(module().planned) == 4


@pytest.mark.parametrize(
    ("rows", "planned"),
    [
        ([(1, 30), (1, 1), (5, 5), (17, 50)], [[0, 1, 2], [0, 5, 22]]),
        ([(1, 30), (1, 2), (1, 1)], [[0, 1, 2, 3]]),
        ([(5, 5), (1, 30), (2, 2)], [[0, 5, 6, 8]]),
        ([(1, 30), (5, 5), (1, 30)], [[0, 1], [0, 5, 6]]),
    ],
)
def test_rows_of_one_token_that_come_first_are_decoded_and_all_others_prefilled(
    rows: list[tuple[int, int]], planned: list[list[int]], backend: Backend
) -> None:
    backend.run(batch(rows))
    assert [schedule.qo_indptr for schedule in module().planned] == planned


def test_steps_alternate_between_two_sets_of_wrappers(backend: Backend) -> None:
    one = batch([(1, 20), (1, 30)])
    attention = backend.attention(one, one.cache)
    for _ in range(4):
        attention.plan(*one.tables)
        run(attention, one)
    first, second, third, fourth = (workspace for workspace, *_ in module().ran_at)
    assert first != second and (first, second) == (third, fourth)


class Watching(Recording):
    """Counts copies to the device and keeps the events."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.events: list[Logged] = []

    def send(self, source: Tensor, target: Tensor) -> RecordedEvent:
        self.sent += 1
        return super().send(source, target)

    def event(self) -> RecordedEvent:
        self.events.append(Logged(self))
        return self.events[-1]


class Logged(RecordedEvent):
    def __init__(self, device: Recording) -> None:
        super().__init__(device)
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")
        super().record()

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        super().synchronize()


class Numberless(Recording):
    """Its tensors have no numbers, so whatever waits for one raises."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("meta")

    def send(self, source: Tensor, target: Tensor) -> RecordedEvent:
        return self.event()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_neither_plan_nor_run_waits_for_the_device(
    window: int | None, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Module, "paged_run", lambda self, *args: self.ran_at.append(()))
    one = batch([(1, 20), (1, 30)] if fixed else [(1, 20), (5, 30)], window=window)
    device = Numberless()
    with pytest.raises(RuntimeError, match="meta tensor"):  # so would a wait for a number show
        torch.zeros(1, device=device.torch).cpu()
    attention = FlashInferAttention(one.spec, one.views(one.cache.to(device.torch)), Workspace(device, 1 << 20))
    attention = attention.fixed(2) if fixed else attention
    q, k, v = (operand.to(device.torch) for operand in one.operands())
    for _ in range(3):
        attention.plan(*one.tables)
        attention.run(q, k, v, LAYER, torch.empty_like(q))
    assert len(module().planned) == len(module().ran_at) == (3 if fixed else 6)


@pytest.mark.parametrize("fixed", [False, True])
def test_tables_that_another_object_has_replaced_are_not_run_with(fixed: bool, backend: Backend) -> None:
    one = batch([(1, 20), (1, 30)])
    attentions = [backend.attention(one, one.cache) for _ in range(2)]
    if fixed:
        attentions = [attention.fixed(2) for attention in attentions]
    for attention in attentions:
        attention.plan(*one.tables)
    with pytest.raises(ValueError, match="another object of the same workspace was planned differently since"):
        run(attentions[0], one)
    run(attentions[1], one)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_plan_waits_until_the_wrappers_own_memory_of_the_plan_before_was_copied(fixed: bool) -> None:
    device, one = Watching(), batch([(1, 20), (1, 30)])
    attention = FlashInferAttention(one.spec, one.views(one.cache), Workspace(device, 1 << 20))
    attention = attention.fixed(2) if fixed else attention
    for _ in range(5):
        attention.plan(*one.tables)
    device.synchronize()  # raises where a copy's source was rewritten under way
    recorded = [event.calls for event in device.events if "record" in event.calls]
    assert len(recorded) == (1 if fixed else 2)
    assert all(calls == ["synchronize", "record"] * (len(calls) // 2) for calls in recorded)


def test_layers_of_several_kinds_share_one_copy_of_a_step_s_tables() -> None:
    device, one = Watching(), batch([(1, 20), (1, 30), (4, 9)])
    workspace = Workspace(device, 1 << 20)
    specs = [AttentionSpec(8, 2, 64, 0.125), AttentionSpec(8, 2, 64, 0.125, window=9), AttentionSpec(8, 2, 64, 0.5)]
    model = ModelAttention(specs, one.views(one.cache), lambda spec, views: FlashInferAttention(spec, views, workspace))
    for steps in (1, 2):
        model.plan(*one.tables)
        assert device.sent == steps
    q, k, v = one.operands()
    for layer in range(3):
        model.attend(q, k, v, layer)
    assert [len(loaded.ran_at) for loaded in LOADED.values()] == [4, 2]  # a window is another module


def test_a_graph_is_planned_once_and_then_fast_into_the_same_places(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counting(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            calls.append(name)
            function(*args, **options)

        return call

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setattr(wrapper, "plan", counting("plan", wrapper.plan))
    monkeypatch.setattr(flashinfer, "fast_decode_plan", counting("fast", flashinfer.fast_decode_plan))
    graph = InGraph(backend, 3, [batch([(1, 200)] * 3)])
    graph.capture()
    for lengths in ((200, 1, 17), (1, 1, 1), (64, 200, 33)):
        graph.plan(batch([(1, length) for length in lengths]))
        graph.replay()
    assert calls == ["plan", "fast", "fast", "fast"]
    assert len(set(module().ran_at)) == 1


def graph_wrapper(rows: int, indices: int) -> Any:
    """FlashInfer's own, for a graph."""
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8),
        kv_layout="NHD",
        backend="fa2",
        use_tensor_cores=True,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(indices, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(rows, dtype=torch.int32),
    )


SHAPE = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_data_type": BF16}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("rows", "pages", "message"),
    [(3, 2, "batch size should be fixed"), (1, 2, "batch size should be fixed"), (2, 4, "size of indices")],
)
def test_flashinfer_refuses_for_a_graph_what_the_contract_refuses(
    rows: int, pages: int, message: str, fast: bool
) -> None:
    wrapper = graph_wrapper(2, 6)
    _, *tables = small()
    wrapper.plan(*tables, **SHAPE)
    _, *tables = small(rows=rows, pages=pages)
    with pytest.raises(ValueError, match=message):
        flashinfer.fast_decode_plan(wrapper, *tables, **SHAPE) if fast else wrapper.plan(*tables, **SHAPE)


def test_flashinfer_refuses_more_rows_in_a_prefill_s_graph_than_its_first_plan_had() -> None:
    def zeros(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="fa2", use_cuda_graph=True, qo_indptr_buf=zeros(3),
        paged_kv_indptr_buf=zeros(3), paged_kv_indices_buf=zeros(6), paged_kv_last_page_len_buf=zeros(2),
    )  # fmt: skip
    shape = {**SHAPE, "head_dim_qk": SHAPE["head_dim"], "causal": True}
    del shape["head_dim"]
    wrapper.plan(*small(tokens=3), **shape)
    with pytest.raises(ValueError, match="cannot exceed the number of rows set"):
        wrapper.plan(*small(tokens=4), **shape)


def run(attention: Any, one: Batch) -> None:
    q, k, v = one.operands()
    attention.run(q, k, v, LAYER, torch.zeros_like(q))


def test_the_emulation_sees_tables_that_are_not_those_of_the_plan(backend: Backend) -> None:
    one = batch([(1, 20), (1, 30)])
    attention = backend.attention(one, one.cache).fixed(2)
    attention.plan(*one.tables)
    assert isinstance(attention, FlashInferAttention)
    attention._staged.kv_last_page_len.add_(1)
    with pytest.raises(AssertionError, match="last page lengths are not those of the plan"):
        run(attention, one)


def test_the_emulation_sees_a_schedule_that_another_plan_has_overwritten() -> None:
    one = batch([(1, 20), (1, 30)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), kv_layout="NHD", backend="fa2", use_tensor_cores=True
    )
    _, *tables = one.tables
    wrapper.plan(*tables, **SHAPE)
    wrapper._int_workspace_buffer.view(torch.int32)[0] += 1
    with pytest.raises(AssertionError, match="schedule of another plan"):
        wrapper.run(one.operands()[0], one.views(one.cache)[LAYER])
