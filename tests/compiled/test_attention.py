"""Attention over pages: the kernel equals the reference, and a token's result is its own."""

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled.attention import cpu
from compiled.attention.base import Attention
from compiled.attention.cpu import CpuAttention, Kernel, load_kernel
from compiled.attention.reference import ReferenceAttention
from tests.compiled.paged import LAYER, LAYERS, Batch

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},  # weights may be rounded to bfloat16, as on a GPU
}
BACKENDS = [ReferenceAttention, CpuAttention]
WINDOWS = [None, 70, 1030]
MIXED = [(1, 700), (33, 50), (1, 1), (5, 1100), (1, 64), (17, 17), (3, 2049)]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Iterator[Kernel]:
    """The kernel of all tests here; ``make asan`` has it built with other flags."""
    flags = os.environ.get("KERNEL_FLAGS")
    built = load_kernel(flags=flags.split()) if flags else load_kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "load_kernel", lambda: built)
        yield built


def assert_equal_to_reference(batch: Batch, kernel: Kernel) -> None:
    expected, expected_cache = batch.run(ReferenceAttention)
    out, cache = batch.run(CpuAttention, kernel=kernel)
    torch.testing.assert_close(out, expected, **TOLERANCE[batch.dtype])
    assert torch.equal(cache.nan_to_num(12345.0), expected_cache.nan_to_num(12345.0))


def test_the_reference_equals_sdpa_on_contiguous_data() -> None:
    batch = Batch([(70, 70), (1, 40), (9, 100)])
    out, _ = batch.run(ReferenceAttention)
    start = 0
    for row, (tokens, positions) in enumerate(batch.rows):
        q, k, v = (whole[row].transpose(0, 1) for whole in (batch.queries, batch.keys, batch.values))
        whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        expected = whole.transpose(0, 1)[positions - tokens :]
        torch.testing.assert_close(out[start : start + tokens], expected, rtol=1e-5, atol=1e-5)
        start += tokens


@pytest.mark.parametrize("window", [1, 5, 16, 40, 100])
def test_the_reference_s_window_equals_a_masked_sdpa(window: int) -> None:
    batch = Batch([(70, 70), (1, 40), (9, 100)], window=window)
    out, _ = batch.run(ReferenceAttention)
    start = 0
    for row, (tokens, positions) in enumerate(batch.rows):
        q, k, v = (whole[row].transpose(0, 1) for whole in (batch.queries, batch.keys, batch.values))
        behind = torch.arange(positions)[:, None] - torch.arange(positions)
        mask = (behind >= 0) & (behind < window)
        whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        expected = whole.transpose(0, 1)[positions - tokens :]
        torch.testing.assert_close(out[start : start + tokens], expected, rtol=1e-5, atol=1e-5)
        start += tokens


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [1, 15, 64, 65, 1024, 1025, 5000])
def test_the_kernel_equals_the_reference_for_any_window(
    window: int, page_size: int, dtype: torch.dtype, kernel: Kernel
) -> None:
    rows = [
        (tokens, positions) for positions in (1, 64, 130, 1025, 2200) for tokens in (1, 17, 65) if tokens <= positions
    ]
    assert_equal_to_reference(Batch(rows, 3, 1, head_dim=32, page_size=page_size, dtype=dtype, window=window), kernel)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 2), (8, 1), (71, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128])
def test_the_kernel_equals_the_reference_for_any_heads(
    head_dim: int, heads: tuple[int, int], dtype: torch.dtype, kernel: Kernel
) -> None:
    rows = [(1, 131), (7, 130), (1, 1), (18, 18)]
    assert_equal_to_reference(Batch(rows, *heads, head_dim=head_dim, dtype=dtype), kernel)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_the_kernel_equals_the_reference_for_any_lengths(page_size: int, dtype: torch.dtype, kernel: Kernel) -> None:
    lengths = [1, 2, 15, 16, 17, 47, 48, 49, 63, 64, 65]
    rows = [(tokens, tokens + past) for tokens in lengths for past in (0, 1, 64, 130)]
    assert_equal_to_reference(Batch(rows, 3, 1, head_dim=32, page_size=page_size, dtype=dtype), kernel)
    rows = [(tokens, positions) for positions in (128, 1023, 1024, 1025, 2048, 2049) for tokens in (1, 65)]
    assert_equal_to_reference(Batch(rows, 3, 1, head_dim=32, page_size=page_size, dtype=dtype), kernel)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_a_mixed_batch_on_any_number_of_threads(
    threads: int, dtype: torch.dtype, window: int | None, kernel: Kernel
) -> None:
    batch = Batch(MIXED, dtype=dtype, window=window)
    expected, _ = batch.run(CpuAttention, kernel=kernel, threads=1)
    out, _ = batch.run(CpuAttention, kernel=kernel, threads=threads)
    assert torch.equal(out, expected)
    torch.testing.assert_close(out, batch.run(ReferenceAttention)[0], **TOLERANCE[dtype])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A step of any shape with any features; sizes are small, so that odd ends are common."""
    kv_heads = draw(st.integers(1, 3))
    lengths = st.tuples(st.sampled_from([1, 1, 2, 7, 16, 33, 70]), st.sampled_from([0, 1, 15, 64, 100, 500, 1500]))
    return Batch(
        rows=[(tokens, tokens + past) for tokens, past in draw(st.lists(lengths, min_size=1, max_size=5))],
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 7, 16, 24, 33, 40, 64, 80, 96, 128, 192])),
        value_dim=draw(st.sampled_from([None, None, 3, 16, 24, 64, 100, 128])),
        page_size=draw(st.sampled_from([1, 3, 16, 64, 100])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
        window=draw(st.sampled_from([None, None, 1, 20, 64, 300, 1100])),
        soft_cap=draw(st.sampled_from([None, 0.5, 3.0, 50.0])),
        with_sinks=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batch=batches(), threads=st.integers(1, 5))
def test_any_shape_with_any_features_equals_the_reference_on_any_number_of_threads(
    batch: Batch, threads: int, kernel: Kernel
) -> None:
    assert_equal_to_reference(batch, kernel)
    alone, several = (batch.run(CpuAttention, kernel=kernel, threads=count)[0] for count in (1, threads))
    assert torch.equal(alone, several)


@pytest.mark.parametrize("flags", [("-O2", "-march=x86-64"), ("-O2", "-march=x86-64-v3"), ("-O2", "-march=x86-64-v4")])
def test_the_kernel_for_smaller_cpus_is_equal_too(flags: tuple[str, ...]) -> None:
    if "avx512" not in torch.backends.cpu.get_cpu_capability().lower():
        pytest.skip("this CPU can not run the kernel of all three levels")
    kernel = load_kernel(flags=flags)
    for dtype in TOLERANCE:
        assert_equal_to_reference(Batch([(1, 131), (18, 50)], head_dim=40, dtype=dtype), kernel)
        everything = Batch([(1, 131), (9, 50)], dtype=dtype, window=30, value_dim=24, soft_cap=1.5, with_sinks=True)
        assert_equal_to_reference(everything, kernel)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_are_written_to_their_slots_and_nowhere_else(backend: type[Attention]) -> None:
    batch = Batch([(1, 33), (20, 40), (5, 5)], padding=6)
    _, cache = batch.run(backend)
    expected = batch.cache.clone()
    keys, values = batch.views(expected)[LAYER]
    for row, (tokens, positions) in enumerate(batch.rows):
        page, slot = batch.slots(row)
        new = slice(positions - tokens, None)
        keys[page[new], slot[new]] = batch.keys[row][new]
        values[page[new], slot[new]] = batch.values[row][new]
    assert torch.equal(cache.nan_to_num(12345.0), expected.nan_to_num(12345.0))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gives_zeros_and_poison_in_unused_slots_never_leaks(
    backend: type[Attention], dtype: torch.dtype
) -> None:
    batch = Batch(MIXED, dtype=dtype, padding=5)
    out, _ = batch.run(backend)
    assert not out.isnan().any()
    assert torch.equal(out[-5:], torch.zeros_like(out[-5:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_may_have_any_strides(backend: type[Attention]) -> None:
    batch = Batch([(1, 33), (20, 40)], padding=2)
    expected, expected_cache = batch.run(backend)
    q, k, v = batch.operands()
    cache = batch.cache.clone()
    attention = backend(batch.spec, batch.views(cache))
    attention.plan(*batch.tables)
    # q and k as slices of one fused projection, v and out as head-major tensors seen through a transpose.
    fused = torch.cat([q, k], dim=1)
    v_HTD, out_HTD = v.transpose(0, 1).contiguous(), q.transpose(0, 1).contiguous()
    q, k, v, out = fused[:, : batch.heads], fused[:, batch.heads :], v_HTD.transpose(0, 1), out_HTD.transpose(0, 1)
    attention.run(q, k, v, LAYER, out)
    assert torch.equal(out, expected)
    assert torch.equal(cache.nan_to_num(12345.0), expected_cache.nan_to_num(12345.0))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_cache_may_have_any_strides(order: tuple[int, int, int], kernel: Kernel) -> None:
    batch = Batch([(1, 33), (20, 40)])
    expected, _ = batch.run(CpuAttention, kernel=kernel)
    views = []
    for keys, values in batch.views(batch.cache):
        inverse = [order.index(axis) for axis in range(3)]
        views.append(tuple(view.permute(*order, 3).contiguous().permute(*inverse, 3) for view in (keys, values)))
    attention = CpuAttention(batch.spec, views, kernel)
    attention.plan(*batch.tables)
    q, k, v = batch.operands()
    out = torch.empty_like(q)
    attention.run(q, k, v, LAYER, out)
    assert torch.equal(out, expected)


def run_in_chunks(batch: Batch, kernel: Kernel, chunks: list[int]) -> Tensor:
    """The first row's whole prompt, a chunk a step."""
    cache = torch.full_like(batch.cache, math.nan)
    attention = CpuAttention(batch.spec, batch.views(cache), kernel)
    outs, end = [], 0
    for chunk in chunks:
        start, end = end, end + chunk
        count = math.ceil(end / batch.page_size)
        pages = torch.tensor(batch.pages[0][:count], dtype=torch.int32)
        if batch.window is not None:  # what fell out of the window is given back and poisoned
            gone = max(0, start + 1 - batch.window) // batch.page_size
            cache[pages[:gone]] = math.nan
            pages[:gone] = 0
        last = torch.tensor([(end - 1) % batch.page_size + 1], dtype=torch.int32)
        attention.plan(
            torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32), pages, last
        )
        outs.append(torch.empty(chunk, batch.heads, batch.head_dim, dtype=batch.dtype))
        step = slice(start, end)
        attention.run(batch.queries[0][step], batch.keys[0][step], batch.values[0][step], LAYER, outs[-1])
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "chunks", [[1] * 5 + [1195], [600, 600], [64] * 18 + [48], [37] * 32 + [16], [1199, 1]], ids=len
)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_prompt_in_chunks_has_the_same_bits_as_whole(
    chunks: list[int], dtype: torch.dtype, window: int | None, kernel: Kernel
) -> None:
    batch = Batch([(1200, 1200)], dtype=dtype, window=window)
    assert torch.equal(run_in_chunks(batch, kernel, chunks), run_in_chunks(batch, kernel, [1200]))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_whatever_its_batch_mates(
    dtype: torch.dtype, window: int | None, kernel: Kernel
) -> None:
    batch = Batch(MIXED, dtype=dtype, window=window)
    together, _ = batch.run(CpuAttention, kernel=kernel)
    q, k, v = batch.operands()
    qo_indptr, kv_indptr, kv_indices, last = batch.tables
    for row, (tokens, _) in enumerate(batch.rows):
        attention = CpuAttention(batch.spec, batch.views(batch.cache.clone()), kernel, threads=2)
        pages = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])]
        attention.plan(
            torch.tensor([0, tokens], dtype=torch.int32),
            torch.tensor([0, len(pages)], dtype=torch.int32),
            pages,
            last[row : row + 1],
        )
        step = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
        alone = torch.empty_like(q[step])
        attention.run(q[step], k[step], v[step], LAYER, alone)
        assert torch.equal(alone, together[step]), f"row {row}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_share_a_page_that_one_of_them_writes_in_this_step(backend: type[Attention]) -> None:
    batch = Batch([(16, 16), (1, 17)])
    batch.pages[1][0] = batch.pages[0][0]
    out, _ = batch.run(backend)
    keys = torch.cat([batch.keys[0], batch.keys[1][16:]]).repeat_interleave(3, dim=1)
    values = torch.cat([batch.values[0], batch.values[1][16:]]).repeat_interleave(3, dim=1)
    scores = torch.einsum("hd,nhd->hn", batch.queries[1][16], keys) * batch.spec.scale
    torch.testing.assert_close(out[16], torch.einsum("hn,nhd->hd", scores.softmax(-1), values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [30.0, 1e4, 1e-4])
def test_scores_of_any_size_do_not_overflow(size: float, kernel: Kernel) -> None:
    batch = Batch([(1, 300), (80, 80)])
    batch.queries = [queries * size for queries in batch.queries]
    expected, _ = batch.run(ReferenceAttention)
    out, _ = batch.run(CpuAttention, kernel=kernel)
    # A float32 score of `size` has itself an error of size * 1e-7, which the exponential amplifies.
    torch.testing.assert_close(out, expected, rtol=1e-5 * max(1, size), atol=1e-5 * max(1.0, size / 10))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_serves_all_layers_and_keeps_its_own_tables(backend: type[Attention]) -> None:
    batch = Batch([(20, 20)])
    expected, _ = batch.run(backend)
    attention = backend(batch.spec, batch.views(batch.cache.clone()))
    tables = batch.tables
    attention.plan(*tables)
    for table in tables:
        table.fill_(-7)
    q, k, v = batch.operands()
    for layer in range(LAYERS):
        out = torch.empty_like(q)
        attention.run(q, k, v, layer, out)
        assert torch.equal(out, expected)
