"""The attention contract, on every backend: any step equals dense attention, eager and in a graph."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled.attention.base import Attention
from compiled.attention.tables import Tables, pad
from compiled.step import PADDING_PAGE
from tests.compiled.backends import BACKENDS, TOLERANCE, Backend, assert_right, backend_of, dense, missing_flashinfer
from tests.compiled.paged import LAYER, Batch, int32

BF16, F16 = torch.bfloat16, torch.float16
Case = dict[str, Any]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


def prefills() -> Iterator[Case]:
    grid = product((12, 17), (54, 97, 512), (1, 17, 37, 127), (1, 5, 16), ((4, 4), (32, 4)), (64, 128, 256))
    for number, (rows, length, tokens, page_size, (heads, kv_heads), head_dim) in enumerate(grid):
        if tokens <= length:
            yield {
                "rows": [(tokens, max(tokens, length - row % 3)) for row in range(rows)],
                "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
                "dtype": (BF16, F16)[number % 2], "seed": number,
            }  # fmt: skip


def decodes() -> Iterator[Case]:
    grid = product((12, 17, 128), (54, 97, 512, 2048), (1, 8, 16), (1, 3, 4, 5, 7, 8), (128, 256), (False, True))
    for number, (rows, length, page_size, group, head_dim, float8) in enumerate(grid):
        yield {
            "rows": [(1, length - row % 23) for row in range(min(rows, 8192 // length))],
            "heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "page_size": page_size,
            "dtype": (BF16, F16)[number % 2], "float8": float8, "seed": number,
        }  # fmt: skip


def windows() -> Iterator[Case]:
    grid = product((3, 13, 33, 43, 111, 533), (1, 3, 19, 99, 199, 1999), (1, 3, 19), (1, 16))
    for number, (behind, length, tokens, page_size) in enumerate(grid):
        if tokens <= length:
            yield {
                "rows": [(1, length), (tokens, length), (tokens, tokens)], "heads": 4, "kv_heads": 2, "head_dim": 64,
                "page_size": page_size, "dtype": (BF16, F16)[number % 2], "window": behind + 1, "seed": number,
            }  # fmt: skip


def a_few(cases: Iterator[Case], count: int) -> list[Any]:
    """Of those that take a moment only."""
    quick = [case for case in cases if products(case) < 2e7]
    return [pytest.param(case, id=str(case["seed"])) for case in random.Random(0).sample(quick, count)]


def products(case: Case) -> int:
    """How many dense attention takes for a step's scores."""
    return sum(tokens * length for tokens, length in case["rows"]) * int(case["heads"]) * int(case["head_dim"])


@pytest.mark.skipif(missing_flashinfer() is not None, reason=str(missing_flashinfer()))
def test_flashinfer_is_among_the_backends() -> None:
    assert "flashinfer" in BACKENDS


@pytest.mark.parametrize("case", a_few(prefills(), 10))
def test_prefill_equals_dense_attention(case: Case, backend: Backend) -> None:
    assert_right(backend.batch(**case), backend)


@pytest.mark.parametrize("case", a_few(decodes(), 14))
def test_decoding_equals_dense_attention(case: Case, backend: Backend) -> None:
    assert_right(backend.batch(**case), backend)


@pytest.mark.parametrize("case", a_few(windows(), 12))
def test_a_window_equals_dense_attention_with_a_mask(case: Case, backend: Backend) -> None:
    assert_right(backend.batch(**case), backend)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", [prefills, decodes, windows])
def test_the_whole_grid_equals_dense_attention(cases: Any, backend: Backend) -> None:
    for case in cases():
        assert_right(backend.batch(**case), backend)


MIXED = {
    "decoding first": [(1, 30), (1, 1), (5, 5), (17, 50), (2, 33)],
    "decoding last": [(17, 50), (5, 5), (1, 30), (1, 1)],
    "decoding between": [(1, 30), (17, 50), (1, 1), (5, 5), (1, 64)],
    "one token that is a prompt": [(1, 1)],
}


@pytest.mark.parametrize("cap", [None, 1.0, 30.0, 50.0])
@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED)
def test_rows_of_all_lengths_in_any_order_with_padding(
    rows: list[tuple[int, int]], cap: float | None, backend: Backend
) -> None:
    window = None if cap is None else 20
    assert_right(backend.batch(rows, 6, 2, 64, dtype=BF16, padding=3, soft_cap=cap, window=window), backend)


@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED)
def test_a_float8_cache_holds_what_its_scales_make_of_the_numbers(
    rows: list[tuple[int, int]], backend: Backend
) -> None:
    assert_right(backend.batch(rows, 6, 2, 64, dtype=BF16, padding=3, float8=True, window=30), backend)


def test_sinks_take_their_share(backend: Backend) -> None:
    assert_right(backend.batch(MIXED["decoding first"], 6, 2, 64, dtype=BF16, with_sinks=True), backend)


def test_values_may_be_smaller_than_keys(backend: Backend) -> None:
    assert_right(backend.batch(MIXED["decoding first"], 6, 2, 64, dtype=BF16, value_dim=32), backend)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_large_scores_do_not_overflow(dtype: torch.dtype, backend: Backend) -> None:
    batch = backend.batch([(1, 40), (5, 70)], 4, 2, 64, dtype=dtype)
    batch.queries = [100 * queries for queries in batch.queries]
    out, _ = backend.run(batch)
    torch.testing.assert_close(out.double(), dense(batch), rtol=5e-2, atol=5e-2)


def test_operands_may_be_slices_of_one_packed_tensor(backend: Backend) -> None:
    batch = backend.batch([(1, 40), (5, 70)], 4, 2, 64, dtype=BF16)
    cache = batch.cache.to(backend.device.torch, copy=True)
    attention = backend.attention(batch, cache)
    attention.plan(*batch.tables)
    packed = torch.cat(batch.operands(), 1).to(backend.device.torch)
    wide = packed.new_full((6, 8, 64), 7.0)
    q, k, v = packed.split((4, 2, 2), 1)
    attention.run(q, k, v, LAYER, wide[:, 2:6])
    torch.testing.assert_close(wide[:, 2:6].cpu().double(), dense(batch), **TOLERANCE[BF16])
    assert bool((wide[:, :2] == 7.0).all()) and bool((wide[:, 6:] == 7.0).all())


class InGraph:
    """A batch's rows of one token each, run by a captured graph of ``rows`` rows."""

    def __init__(self, backend: Backend, rows: int, batches: list[Batch], row_pages: int | None = None) -> None:
        self.backend, self.rows = backend, rows
        first, largest = batches[0], max(batches, key=lambda batch: len(batch.cache))
        self.cache = torch.zeros_like(largest.cache, device=backend.device.torch)
        self.attention = backend.attention(first, self.cache).fixed(rows, row_pages)
        shapes = [(rows, first.heads, first.head_dim), *[(rows, first.kv_heads, first.head_dim)] * 2]
        self.operands = [torch.zeros(shape, dtype=first.dtype, device=backend.device.torch) for shape in shapes]
        self.out = torch.zeros_like(self.operands[0])

    def capture(self) -> None:
        """With one page a row, as a server does before it knows anything."""

        def work(arguments: list[Any]) -> tuple[Any, ...]:
            q, k, v, out = arguments
            self.attention.run(q, k, v, LAYER, out)
            return (out,)

        idle = (int32(list(range(self.rows + 1))),) * 2
        self.attention.plan(*idle, int32([PADDING_PAGE] * self.rows), int32([1] * self.rows))
        with self.attention.capturing():
            work([*self.operands, self.out])  # once for real: kernels are loaded
            self.graph, _ = self.backend.device.capture(work, [*self.operands, self.out])

    def plan(self, batch: Batch) -> None:
        self.cache[: len(batch.cache)].copy_(batch.cache)
        for operand, given in zip(self.operands, batch.operands(), strict=True):
            operand.zero_()
            operand[: len(given)].copy_(given)
        self.attention.plan(*pad(batch.tables, self.rows))

    def replay(self) -> Tensor:
        self.graph.replay()
        self.backend.device.synchronize()
        return self.out.cpu()


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_a_graph_captured_with_short_rows_replays_long_ones_and_fewer(
    window: int | None, float8: bool, backend: Backend
) -> None:
    shape: Case = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": BF16, "window": window, "float8": float8}
    lengths = ([54] * 5, [700, 54, 1, 33], [54, 17], [16, 1, 2048])
    batches = [backend.batch([(1, n) for n in of_step], seed=len(of_step), **shape) for of_step in lengths]
    if backend.refuses(batches[0]):
        return
    graph = InGraph(backend, 5, batches)
    graph.capture()
    for batch in batches:
        graph.plan(batch)
        out = graph.replay()
        real = len(batch.rows)
        torch.testing.assert_close(out[:real].double(), dense(batch), **TOLERANCE[BF16])
        assert bool(out.isfinite().all())


def small(tokens: int = 1, rows: int = 2, pages: int = 2) -> Tables:
    """``rows`` rows of ``pages`` pages."""
    counts = list(range(rows + 1))
    indices = int32([1 + i % 6 for i in range(rows * pages)])
    return int32([tokens * n for n in counts]), int32([pages * n for n in counts]), indices, int32([16] * rows)


@pytest.fixture
def fixed(backend: Backend) -> Attention:
    """For two rows of at most three pages each, on average."""
    batch = backend.batch([(1, 17), (1, 20)], 4, 2, 64, dtype=BF16)
    return backend.attention(batch, torch.zeros_like(batch.cache).to(backend.device.torch)).fixed(2, 3)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (small(rows=1), "1 rows are planned for a graph of 2"),
        (small(rows=3), "3 rows are planned for a graph of 2"),
        (small(tokens=2), "4 tokens are planned for a graph of 2 rows of one token each"),
        (small(pages=4), "kv_indices has 8 entries, a graph of 2 rows has room for 6"),
    ],
)
def test_a_plan_that_a_graph_cannot_replay_is_refused(tables: Tables, message: str, fixed: Attention) -> None:
    fixed.plan(*small())
    with pytest.raises(ValueError, match=message):
        fixed.plan(*tables)
    with pytest.raises(ValueError, match="run before plan"):
        run(fixed, 0)
    fixed.plan(*small(pages=3))
    run(fixed, 0)


def run(attention: Attention, layer: int) -> None:
    q, k, v = (torch.zeros(2, heads, 64, dtype=BF16, device=attention.device) for heads in (4, 2, 2))
    attention.run(q, k, v, layer, torch.empty_like(q))


def test_a_graph_s_second_run_of_a_layer_needs_a_second_plan(fixed: Attention) -> None:
    fixed.plan(*small())
    run(fixed, 0)
    run(fixed, 1)
    with pytest.raises(ValueError, match="layer 0 runs a second time on one plan"):
        run(fixed, 0)
    fixed.plan(*small())
    run(fixed, 0)


def test_a_capture_may_run_a_layer_many_times_and_spends_the_plan(fixed: Attention) -> None:
    fixed.plan(*small())
    with fixed.capturing():
        for _ in range(3):
            run(fixed, 0)
    with pytest.raises(ValueError, match="run before plan"):
        run(fixed, 0)


def test_what_serves_a_graph_shares_no_plan_with_what_it_was_made_from(backend: Backend) -> None:
    batch = backend.batch([(1, 17), (1, 20)], 4, 2, 64, dtype=BF16)
    eager = backend.attention(batch, torch.zeros_like(batch.cache).to(backend.device.torch))
    one, other = eager.fixed(2), eager.fixed(2)
    one.plan(*small())
    for unplanned in (eager, other):
        with pytest.raises(ValueError, match="run before plan"):
            run(unplanned, 0)
    with pytest.raises(ValueError, match="only what `fixed` gives"), eager.capturing():
        pass
    with pytest.raises(ValueError, match="at least one row and one page, not 0 rows"):
        eager.fixed(0)


def test_padding_fills_up_with_rows_on_the_padding_page() -> None:
    qo_indptr, kv_indptr, kv_indices, kv_last_page_len = pad(small(), 4)
    assert qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert kv_indptr.tolist() == [0, 2, 4, 5, 6]
    assert kv_indices.tolist() == [1, 2, 3, 4, PADDING_PAGE, PADDING_PAGE]
    assert kv_last_page_len.tolist() == [16, 16, 1, 1]
    assert pad(small(), 2)[0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="2 rows cannot be padded to 1"):
        pad(small(), 1)
