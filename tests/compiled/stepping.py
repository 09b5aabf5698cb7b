"""A small model without a compiler, and steps that run through any forward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled import batch as batches
from compiled.attention.base import AttentionSpec
from compiled.attention.layers import ModelAttention
from compiled.attention.reference import ReferenceAttention
from compiled.batch import Batch
from compiled.gpu.graphs import Graphs
from compiled.kv_store import KVShape, KVStore, LayerShape
from compiled.program import SMALLEST, Program, bind
from compiled.recipe import Attention, Fed, ModelFacts, Parameter, Recipe, Run
from compiled.step import Row, Sampling, Step

VOCABULARY, SPEC = 97, AttentionSpec(2, 1, 4, 0.5)
PAGE, ROW_PAGES, ROWS = 4, 6, 12

Forward = Callable[[Batch], Tensor]


def program(
    layers: int,
    weights: dict[str, Tensor] | None = None,
    spec: AttentionSpec = SPEC,
    dtype: torch.dtype = torch.float32,
) -> Program:
    """Attention between pieces that hand on a residual; two values are held from the first layer to the last, one of
    them an attention's. ``weights`` receives what it is bound to."""
    random, width = torch.Generator().manual_seed(7), spec.num_heads * spec.head_dim
    heads = spec.num_heads + 2 * spec.num_kv_heads

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random) * (8 / width) ** 0.5).to(dtype)

    made = {"table": weight(VOCABULARY, width), "head": weight(VOCABULARY, width)}
    for layer in range(layers):
        made |= {f"qkv{layer}": weight(heads * spec.head_dim, width), f"out{layer}": weight(width, width)}
    if weights is not None:
        weights |= made
    first = Run("embed", "first", ("ids", "positions", "table", "qkv0"), ("turn", "x0", "q0", "k0", "v0"))
    calls: list[Run | Attention] = [first]
    for layer in range(layers):
        calls.append(Attention(layer, f"q{layer}", f"k{layer}", f"v{layer}", f"o{layer}"))
        taken, given = ("turn", f"o{layer}", f"x{layer}", f"out{layer}"), [f"{name}{layer + 1}" for name in "xqkv"]
        if layer + 1 < layers:
            calls.append(Run(f"layers.{layer}", "middle", (*taken, f"qkv{layer + 1}"), tuple(given)))
    calls.append(Run("head", "last", (*taken, "o0", "rows", "head"), ("logits",)))
    fed = {name: Fed(name) for name in ("ids", "positions", "rows", "T")}
    recipe = Recipe(
        calls=tuple(calls),
        sources=fed | {name: Parameter((name,)) for name in made},
        constants=(),
        held={},
        output="logits",
        model=ModelFacts("Small", VOCABULARY, None, (2,), (spec,) * layers, {}, True),
    )
    pieces = _Pieces(spec)
    return bind(recipe, {"first": pieces.first, "middle": pieces.middle, "last": pieces.last}, made)


class _Pieces:
    """Functions that empty the list of their arguments, like compiled ones."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]

    def first(self, arguments: list[Any]) -> tuple[Tensor, ...]:
        ids, positions, table, qkv = arguments
        arguments.clear()
        turn = (positions * 0.5).cos()[:, None].to(table.dtype)
        return turn, *self._projected(table[ids] * turn, qkv)

    def middle(self, arguments: list[Any]) -> tuple[Tensor, ...]:
        *taken, qkv = arguments
        arguments.clear()
        return self._projected(self._added(*taken), qkv)

    def last(self, arguments: list[Any]) -> tuple[Tensor, ...]:
        *taken, first_THE, rows, head = arguments
        arguments.clear()
        return (_times((self._added(*taken) + first_THE.flatten(1))[rows], head),)

    def _added(self, turn: Tensor, out_THE: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return x + _times(out_THE.flatten(1) * turn, weight).tanh()

    def _projected(self, x: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values are views of one tensor, as merged linears give them."""
        q, k, v = _times(x, qkv).view(len(x), sum(self._heads), -1).split(self._heads, dim=1)
        return x, q, k, v


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()``, where a row has the same bits whatever rows are beside it: matrix libraries have not."""
    return (x[:, None] * weight).sum(-1)


def attention_over(
    specs: Sequence[AttentionSpec], backend: Any = ReferenceAttention, dtype: torch.dtype = torch.float32
) -> tuple[KVStore, ModelAttention]:
    """Of an own cache, with room for `ROWS` requests."""
    layers = tuple(LayerShape(spec.num_kv_heads, spec.head_dim, spec.value_size) for spec in specs)
    store = KVStore(KVShape(layers, PAGE, dtype), 1 + ROWS * ROW_PAGES)
    return store, ModelAttention(specs, store.layers, backend)


def plainly(program: Program, attention: ModelAttention) -> Forward:
    def forward(batch: Batch) -> Tensor:
        attention.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
        return program(batch.ids_T, batch.positions_T, batch.rows_R, attention)

    return forward


def through(graphs: Graphs) -> Forward:
    def forward(batch: Batch) -> Tensor:
        tokens, rows, wanted = int(batch.qo_indptr[-1]), len(batch.kv_last_page_len), sum(batch.samples)
        place = graphs.place(tokens, wanted, decoding=tokens == rows == wanted)
        place.inputs.zero_()
        place.ids_T[:tokens], place.positions_T[:tokens] = batch.ids_T[:tokens], batch.positions_T[:tokens]
        place.rows_R[:wanted] = batch.rows_R[:wanted]
        return graphs.run(place, (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len))

    return forward


def step(*rows: tuple[int, int, int]) -> Batch:
    """One row for each ``(request, start, end)``: these tokens of it, and the logits of the last."""
    made = []
    for request, start, end in rows:
        pages = tuple(range(1 + request * ROW_PAGES, 1 + (request + 1) * ROW_PAGES))
        ids = tuple((3 + 7 * request + 11 * i) % VOCABULARY for i in range(start, end))
        made.append(Row(request, ids, start, pages, Sampling()))
    return batches.build(Step(0, tuple(made)), PAGE, SMALLEST)


def logits(forward: Forward, *batch: Batch) -> Tensor:
    """Of the rows of all steps, one after another."""
    with torch.inference_mode():
        return torch.cat([forward(one)[: sum(one.samples)].clone() for one in batch])
