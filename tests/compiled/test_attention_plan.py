"""Attention is strict: page tables and operands that do not fit are refused by name, with the numbers."""

import math
from typing import Any

import pytest
import torch

from compiled.attention.base import FP8, Attention, AttentionSpec
from compiled.attention.cpu import CpuAttention
from compiled.attention.reference import ReferenceAttention
from tests.compiled.paged import LAYERS, Batch, int32


@pytest.fixture(params=[ReferenceAttention, CpuAttention], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> type[Attention]:
    return request.param


@pytest.fixture
def batch() -> Batch:
    return Batch([(1, 17), (3, 20)], heads=4, kv_heads=2, head_dim=32)


@pytest.mark.parametrize(
    ("table", "value", "message"),
    [
        ("qo_indptr", int32([0, 1, 4]).long(), r"qo_indptr must be .* int32 .*, not torch.int64"),
        ("kv_indices", int32([1, 2, 3, 4]).reshape(2, 2), r"kv_indices must be a one-dimensional .*\(2, 2\)"),
        ("qo_indptr", int32([0, 4]), "qo_indptr has 2 entries, not 3 for 2 rows"),
        ("kv_indptr", int32([0, 2, 3, 4]), "kv_indptr has 4 entries, not 3 for 2 rows"),
        ("qo_indptr", int32([1, 2, 4]), r"qo_indptr\[0\] is 1, not 0"),
        ("qo_indptr", int32([0, 3, 2]), "qo_indptr does not rise at row 1: 3 then 2"),
        ("qo_indptr", int32([0, 0, 3]), "qo_indptr does not rise at row 0: 0 then 0"),
        ("kv_indptr", int32([0, 4, 4]), "kv_indptr does not rise at row 1: 4 then 4"),
        ("kv_indptr", int32([0, 2, 5]), "kv_indptr ends at 5 but kv_indices has 4 entries"),
        ("kv_indices", int32([1, 2, -1, 4]), r"kv_indices\[2\] is -1, outside 0..7"),
        ("kv_indices", int32([1, 2, 3, 8]), r"kv_indices\[3\] is 8, outside 0..7"),
        ("kv_last_page_len", int32([1, 0]), r"kv_last_page_len\[1\] is 0, outside 1..16"),
        ("kv_last_page_len", int32([17, 4]), r"kv_last_page_len\[0\] is 17, outside 1..16"),
        ("kv_last_page_len", int32([]), "kv_last_page_len has no rows"),
        ("qo_indptr", int32([0, 18, 19]), "row 0 has 18 query tokens but a kv length of 17"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    table: str, value: torch.Tensor, message: str, backend: type[Attention], batch: Batch
) -> None:
    attention = backend(batch.spec, batch.views(batch.cache))
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    tables = dict(zip(names, batch.tables, strict=True))
    with pytest.raises(ValueError, match=message):
        attention.plan(**{**tables, table: value})


def test_nothing_runs_without_a_plan_nor_after_a_refused_one(backend: type[Attention], batch: Batch) -> None:
    attention = backend(batch.spec, batch.views(batch.cache))
    q, k, v = batch.operands()
    with pytest.raises(ValueError, match="run before plan"):
        attention.run(q, k, v, 0, torch.empty_like(q))
    attention.plan(*batch.tables)
    qo_indptr, *others = batch.tables
    with pytest.raises(ValueError, match="qo_indptr"):
        attention.plan(qo_indptr + 1, *others)
    with pytest.raises(ValueError, match="run before plan"):
        attention.run(q, k, v, 0, torch.empty_like(q))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 4, 32, dtype=torch.bfloat16)}, "q is torch.bfloat16 on cpu, not torch.float32 on cpu"),
        ({"q": torch.zeros(4, 5, 32)}, r"q is \(4, 5, 32\), not \(4, 4, 32\)"),
        ({"q": torch.zeros(3, 4, 32)}, "q has 3 tokens but 4 are planned"),
        ({"q": torch.zeros(4, 4, 64)[:, :, ::2]}, "q: the last dimension must be contiguous"),
        ({"k": torch.zeros(5, 2, 32)}, r"k is \(5, 2, 32\), not \(4, 2, 32\)"),
        ({"v": torch.zeros(4, 2, 32, dtype=torch.float16)}, "v is torch.float16"),
        ({"v": torch.zeros(4, 32, 2).transpose(1, 2)}, "v: the last dimension must be contiguous"),
        ({"out": torch.zeros(4, 128)}, r"out is \(4, 128\), not \(4, 4, 32\)"),
        ({"layer": LAYERS}, "layer 3 outside 0..2"),
        ({"layer": -1}, "layer -1 outside 0..2"),
    ],
)
def test_an_operand_that_does_not_fit_is_refused(
    change: dict[str, object], message: str, backend: type[Attention], batch: Batch
) -> None:
    attention = backend(batch.spec, batch.views(batch.cache))
    attention.plan(*batch.tables)
    q, k, v = batch.operands()
    operands = {"q": q, "k": k, "v": v, "layer": 0, "out": torch.empty_like(q), **change}
    with pytest.raises(ValueError, match=message):
        attention.run(operands["q"], operands["k"], operands["v"], operands["layer"], operands["out"])


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "layers is empty"),
        ([(torch.zeros(4, 16, 2, 64),) * 2], r"must be \[P, S, 2, 32\], not \(4, 16, 2, 64\)"),
        ([(torch.zeros(4, 16, 2, 32, dtype=torch.float64),) * 2], "must be float32, .* not torch.float64"),
        ([(torch.zeros(4, 16, 2, 64)[..., ::2],) * 2], "the last dimension must be contiguous"),
        ([(torch.zeros(4, 16, 2, 32), torch.zeros(5, 16, 2, 32))], r"keys are \(\(4, .* values \(\(5, "),
        ([(torch.zeros(4, 16, 2, 32), torch.zeros(4, 2, 16, 32).transpose(1, 2))], "keys have strides"),
        ([(torch.zeros(4, 16, 2, 32),) * 2, (torch.zeros(4, 16, 2, 32).half(),) * 2], "layer 1 has another layout"),
    ],
)
def test_views_that_do_not_fit_are_refused(
    views: list[tuple[torch.Tensor, torch.Tensor]], message: str, backend: type[Attention]
) -> None:
    with pytest.raises(ValueError, match=message):
        backend(AttentionSpec(4, 2, 32, 1.0), views)


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads 9 is no multiple of num_kv_heads 2"):
        AttentionSpec(9, 2, 64, 1.0)
    with pytest.raises(ValueError, match="must be positive"):
        AttentionSpec(4, 0, 64, 1.0)


def test_the_kernel_refuses_scales_and_threads_that_it_cannot_run() -> None:
    cache = torch.zeros(4, 16, 2, 32)
    with pytest.raises(ValueError, match=r"scale -1.0 \(it must be positive\)"):
        CpuAttention(AttentionSpec(4, 2, 32, -1.0), [(cache, cache)])
    with pytest.raises(ValueError, match="threads is 0"):
        CpuAttention(AttentionSpec(4, 2, 32, 1.0), [(cache, cache)], threads=0)


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [
        (FP8, {}, "operands beside a float8_e4m3fn cache must be of one of .*, not torch.float8_e4m3fn"),
        (FP8, {"dtype": torch.float16}, "a float8_e4m3fn cache of 2 layers has 0 pairs of scales"),
        (FP8, {"dtype": torch.float16, "scales": [(1.0, 1.0)]}, "a float8_e4m3fn cache of 2 layers has 1 pairs"),
        (FP8, {"dtype": torch.float16, "scales": [(1.0, 1.0), (0.5, 0.0)]}, r"layer 1: scales .*, not \(0.5, 0.0\)"),
        (FP8, {"dtype": torch.float16, "scales": [(math.nan, 1.0)] * 2}, r"layer 0: scales .*, not \(nan, 1.0\)"),
        (torch.float16, {"dtype": torch.float32}, "operands are torch.float32 but the KV cache is torch.float16"),
        (torch.float16, {"scales": [(1.0, 1.0)] * 2}, "scales are given, but the KV cache is torch.float16"),
    ],
)
def test_a_cache_s_scales_that_do_not_fit_are_refused(
    cache: torch.dtype, options: dict[str, Any], message: str, backend: type[Attention]
) -> None:
    views = torch.zeros(4, 16, 2, 32).to(cache)
    with pytest.raises(ValueError, match=message):
        backend(AttentionSpec(4, 2, 32, 1.0), [(views, views)] * 2, **options)


def test_the_cpu_kernel_has_no_float8_cache() -> None:
    views = torch.zeros(4, 16, 2, 32).to(FP8)
    with pytest.raises(ValueError, match="cpu attention has no float8_e4m3fn KV cache"):
        CpuAttention(AttentionSpec(4, 2, 32, 1.0), [(views, views)], dtype=torch.float32, scales=[(1.0, 1.0)])
