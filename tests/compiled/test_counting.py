"""Bytes and operations of a graph are those that one writes down by hand, whatever T and R are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from compiled.counting import count
from compiled.linear.op import packed_rows, packed_shape
from compiled.work import Polynomial, Work, attention_work, constant

H, INNER, VOCABULARY = 32, 48, 100
BF16, F32 = torch.bfloat16, torch.float32
SIZES = [(2, 2), (7, 3), (512, 64)]

Shape = tuple[int | str, ...]


def work_of(function: Callable[..., Any], *inputs: tuple[Shape, torch.dtype]) -> Work:
    """Of ``function`` over tensors in whose shapes ``T`` and ``R`` are symbols."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    symbols: dict[int | str, Any] = {}
    for name, hint in (("T", 16), ("R", 4)):
        symbol = shapes.create_symbol(hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
        symbols[name] = shapes.create_symintnode(symbol, hint=hint)
    traced = fx.symbolic_trace(function)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    with FakeTensorMode(shape_env=shapes):
        for node, (shape, dtype) in zip(placeholders, inputs, strict=True):
            node.meta["example_value"] = torch.empty([symbols.get(size, size) for size in shape], dtype=dtype)
    return count(traced, {str(symbols["T"]): "T", str(symbols["R"]): "R"})


def moved(work: Work) -> Polynomial:
    assert work.bytes is not None
    return work.bytes


def norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype),)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
    return (x + functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down),)


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_a_linear_reads_its_weight_once_and_multiplies_each_token_by_all_of_it(tokens: int, rows: int) -> None:
    work = work_of(
        lambda x, w, b: (functional.linear(x, w, b),), (("T", H), BF16), ((INNER, H), BF16), ((INNER,), BF16)
    )
    assert moved(work)(tokens, rows) == 2 * (tokens * H + INNER * H + INNER + tokens * INNER)
    assert work.flops(tokens, rows) == tokens * (2 * H * INNER + INNER)


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_a_packed_linear_has_the_same_operations_and_the_padded_weight(tokens: int, rows: int) -> None:
    def packed(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (torch.ops.streamengine.linear.default(x, weight, None, INNER),)

    work = work_of(packed, (("T", H), BF16), (packed_shape(INNER, H, BF16), BF16))
    assert moved(work)(tokens, rows) == 2 * (tokens * H + 64 * H + tokens * INNER)  # 48 outputs in panels of 32
    assert work.flops(tokens, rows) == 2 * tokens * H * INNER


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_a_norm_squares_averages_and_scales(tokens: int, rows: int) -> None:
    work = work_of(norm, (("T", H), BF16), ((H,), BF16))
    assert moved(work)(tokens, rows) == 2 * (2 * tokens * H + H)
    # Of each token: H squares, their mean (H - 1 sums and a division), epsilon, root, H products twice.
    assert work.flops(tokens, rows) == tokens * (H + H + 2 + 2 * H)


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_an_mlp_keeps_what_is_between_its_linears_to_itself(tokens: int, rows: int) -> None:
    work = work_of(mlp, (("T", H), F32), ((INNER, H), F32), ((INNER, H), F32), ((H, INNER), F32))
    assert moved(work)(tokens, rows) == 4 * (2 * tokens * H + 3 * H * INNER)
    assert work.flops(tokens, rows) == tokens * (3 * 2 * H * INNER + 2 * INNER + H)


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_of_a_table_only_the_rows_are_read_that_are_looked_up(tokens: int, rows: int) -> None:
    plain = work_of(lambda ids, w: (functional.embedding(ids, w),), (("T",), torch.long), ((VOCABULARY, H), BF16))
    assert moved(plain)(tokens, rows) == 8 * tokens + 2 * 2 * tokens * H
    shape = packed_shape(VOCABULARY, H, BF16)
    packed = work_of(lambda w, ids: (packed_rows(w, ids, H),), (shape, BF16), (("T",), torch.long))
    assert moved(packed)(tokens, rows) == moved(plain)(tokens, rows)
    assert plain.flops(tokens, rows) == packed.flops(tokens, rows) == 0


@pytest.mark.parametrize(("tokens", "rows"), SIZES)
def test_a_head_multiplies_the_rows_that_are_asked_for_alone(tokens: int, rows: int) -> None:
    def head(x: Tensor, chosen: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (functional.linear(x[chosen], weight),)

    work = work_of(head, (("T", H), F32), (("R",), torch.long), ((VOCABULARY, H), F32))
    assert moved(work)(tokens, rows) == 8 * rows + 4 * (rows * H + VOCABULARY * H + rows * VOCABULARY)
    assert work.flops(tokens, rows) == 2 * rows * H * VOCABULARY


def test_a_table_that_is_looked_up_and_multiplied_is_read_whole() -> None:
    def tied(ids: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (functional.linear(functional.embedding(ids, weight), weight),)

    work = work_of(tied, (("T",), torch.long), ((VOCABULARY, H), F32))
    assert moved(work)(512, 2) == 8 * 512 + 4 * (VOCABULARY * H + 512 * VOCABULARY)


def test_views_of_an_input_are_neither_read_nor_written() -> None:
    work = work_of(lambda x: (x.view(-1, 2, H // 2).transpose(0, 1),), (("T", H), F32))
    assert (moved(work).terms, work.flops.terms) == ((), ())


def test_an_operator_that_nobody_counts_is_named() -> None:
    work = work_of(lambda x: (torch.cumprod(x, -1) + 1.0,), (("T", H), F32))
    assert work.uncounted == ("aten.cumprod.default",)
    assert work.flops(5, 2) == 5 * H


def test_of_a_mixture_of_experts_the_operations_are_known_and_not_which_weights_are_read() -> None:
    def experts(x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor]:
        return (functional.grouped_mm(x, weight, offs=ends),)

    work = work_of(experts, (("T", H), BF16), ((8, H, INNER), BF16), ((8,), torch.int32))
    assert work == Work(None, constant(2 * H * INNER) * Polynomial(((1, 1, 0),)))


def test_a_layer_norm_averages_twice_scales_and_shifts() -> None:
    work = work_of(lambda x, w, b: (functional.layer_norm(x, (H,), w, b),), (("T", H), F32), ((H,), F32), ((H,), F32))
    assert work.flops(9, 2) == 9 * (7 * H + 2)
    assert moved(work)(9, 2) == 4 * (2 * 9 * H + 2 * H)


def test_a_softmax_has_five_operations_an_element_less_two_a_row() -> None:
    work = work_of(lambda x: (functional.softmax(x, -1),), (("T", H), F32))
    assert work.flops(9, 2) == 9 * (5 * H - 2)


def test_formulas_add_multiply_and_read_as_one_writes_them() -> None:
    tokens, rows = Polynomial(((1, 1, 0),)), Polynomial(((1, 0, 1),))
    formula = constant(3) * tokens * tokens + tokens * rows + constant(1024) - rows
    assert str(formula) == "3·T^2 + T·R - 1·R + 1,024"
    assert formula(5, 2) == 75 + 10 - 2 + 1024
    assert str(formula - formula) == "0"


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 9)], [(5, 4), (2, 1)], [(17, 1), (0, 3), (7, 2)]])
def test_attention_is_counted_by_what_its_tokens_see(window: int | None, rows: list[tuple[int, int]]) -> None:
    scores = parts = 0
    for start, count_ in rows:
        seen = [set(range(max(0, p + 1 - (window or p + 1)), p + 1)) for p in range(start, start + count_)]
        scores += sum(map(len, seen))
        parts += 2 * len({p for one in seen for p in one if p < start})  # of keys and values that are in the pages
        parts += 4 * count_  # of new keys and values: read, and written to their pages
    queries = sum(count_ for _, count_ in rows) * 4
    found = attention_work(heads=4, kv_heads=2, key_size=16, value_size=8, window=window, item_bytes=2, rows=rows)
    assert found == (2 * (parts // 2 * 2 * (16 + 8) + queries * (16 + 8)), 2 * 4 * (16 + 8) * scores)
