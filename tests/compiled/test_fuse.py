"""Linears of a cut graph are merged and packed where that is the same, and left alone where it is not."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.nn import functional

from compiled.fuse import fuse
from compiled.linear.op import load_kernel, pack
from compiled.recipe import Fed, Parameter, Source
from compiled.split import Piece, Split, split

SIZE, HEADS, VOCABULARY = 32, 4, 50


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    load_kernel()


class Layer(nn.Module):
    """Queries, keys, values, and a gated MLP: seven linears of four inputs."""

    def __init__(self, bias: bool = False, value_bias: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(SIZE, SIZE, bias=one) for one in (bias, bias, bias or value_bias)
        )
        self.out = nn.Linear(SIZE, SIZE, bias=bias)
        self.gate, self.up = nn.Linear(SIZE, 48, bias=bias), nn.Linear(SIZE, 48, bias=bias)
        self.down = nn.Linear(48, SIZE, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        heads = (one(x).view(len(x), HEADS, -1) for one in (self.first, self.second, self.third))
        x = x + self.out(torch.ops.streamengine.attention(*heads).flatten(1))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, tied: bool, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, SIZE, padding_idx=0), nn.ModuleList(layers)
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cut(module: nn.Module, given: Tensor) -> Split:
    """``module`` as `compiled.trace` cuts a model."""
    graphs: list[tuple[fx.GraphModule, Sequence[Any]]] = []
    names = {id(tensor): name for name, tensor in module.requires_grad_(False).named_parameters()}
    torch._dynamo.mark_dynamic(given, 0)

    def capture(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def called(*values: Any) -> tuple[Tensor]:
            graphs.append((graph, values))
            return (torch.empty(0),)

        return called

    def run(x: Tensor) -> Any:
        return module(x)

    with torch.no_grad():
        torch.compile(run, backend=capture, fullgraph=True)(given)
    torch._dynamo.reset_code(run.__code__)
    ((graph, values),) = graphs
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    sources: dict[str, tuple[str, Source]] = {}
    for name, value in zip(placeholders, values, strict=True):
        if id(value) in names:
            sources[name] = (names[id(value)], Parameter((names[id(value)],)))
        else:
            sources[name] = (name, Fed("x" if value is given else "T"))
    return split(graph, sources)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query * key.mean(0) + value


def run(parts: Split, module: nn.Module, given: Tensor) -> Tensor:
    """What a program does with ``parts``."""
    weights = dict(module.named_parameters())
    values: dict[str, Any] = {}
    for name, source in parts.sources.items():
        if isinstance(source, Parameter):
            merged = torch.cat([weights[one] for one in source.names])
            values[name] = pack(merged) if source.packed else merged
        elif isinstance(source, Fed):
            values[name] = given if source.name == "x" else len(given)
    for call in parts.calls:
        arguments = [values[name] for name in call.inputs]
        if isinstance(call, Piece):
            values.update(zip(call.outputs, call.graph(*arguments), strict=True))
        else:
            values[call.output] = attend(*arguments)
    return values[parts.output]


def fused(module: nn.Module, given: Tensor) -> Split:
    """Fused, and seen to compute what the module does."""
    parts = cut(module, given)
    result = fuse(parts)
    torch.testing.assert_close(run(result, module, given), run(parts, module, given))
    return result


def targets(parts: Split) -> Counter[str]:
    """How often each function is called, by its name."""
    nodes = (node for piece in parts.pieces for node in piece.graph.graph.nodes if node.op == "call_function")
    return Counter(getattr(node.target, "__name__", str(node.target)) for node in nodes)


def packed(parts: Split) -> list[tuple[str, ...]]:
    return sorted(one.names for one in parts.sources.values() if isinstance(one, Parameter) and one.packed)


def ids() -> Tensor:
    return torch.arange(9)


def x() -> Tensor:
    return torch.randn(9, SIZE, generator=torch.Generator().manual_seed(0))


def test_linears_of_one_input_become_one_on_their_weights_merged() -> None:
    result = fused(Model(False, Layer()), ids())
    assert packed(result) == [
        ("head.weight",),
        ("layers.0.down.weight",),
        ("layers.0.first.weight", "layers.0.second.weight", "layers.0.third.weight"),
        ("layers.0.gate.weight", "layers.0.up.weight"),
        ("layers.0.out.weight",),
    ]
    calls = targets(result)
    assert calls["linear.default"] == 5
    assert calls["linear"] == 0


def test_biases_are_merged_too() -> None:
    result = fused(Model(False, Layer(bias=True)), ids())
    merged = {one.names for one in result.sources.values() if isinstance(one, Parameter) and not one.packed}
    assert ("layers.0.first.bias", "layers.0.second.bias", "layers.0.third.bias") in merged
    assert ("layers.0.gate.bias", "layers.0.up.bias") in merged


def test_only_linears_that_all_have_a_bias_or_none_are_merged() -> None:
    names = packed(fused(Model(False, Layer(value_bias=True)), ids()))
    assert ("layers.0.first.weight", "layers.0.second.weight") in names
    assert ("layers.0.third.weight",) in names


def test_layers_that_were_equal_stay_equal() -> None:
    module = Model(False, *(Layer() for _ in range(4)))
    before, after = cut(module, ids()), fused(module, ids())
    assert len(after.unique) == len(before.unique) == 3
    assert {piece.key for piece in after.pieces}.isdisjoint(piece.key for piece in before.pieces)
    assert [piece.name for piece in after.pieces] == [piece.name for piece in before.pieces]


def test_a_tied_embedding_reads_the_heads_packed_weight() -> None:
    result = fused(Model(True, Layer()), ids())
    assert ("embed.weight",) in packed(result)
    assert [name for name in result.sources if "embed" in name] == ["embed.weight"]
    assert targets(result)["packed_rows"] == 1


def test_an_embedding_alone_stays_plain() -> None:
    result = fused(Model(False, Layer()), ids())
    assert result.sources["embed.weight"] == Parameter(("embed.weight",))
    assert targets(result)["embedding"] == 1


def test_a_layer_that_runs_twice_is_packed_once_and_not_merged() -> None:
    layer = Layer()
    result = fused(Model(False, layer, layer), ids())
    assert ("layers.0.first.weight",) in packed(result)
    assert targets(result)["linear.default"] == 2 * 7 + 1


class Alone(nn.Module):
    """One linear whose weight something makes special."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.weight, self._compute = nn.Parameter(weight), compute

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x, self.weight)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: functional.linear(x, w) + w.sum(),
        lambda x, w: functional.linear(x, w * 2),
        lambda x, w: functional.linear(x, functional.linear(w, w)),
        lambda x, w: torch.addmm(x, x, w),
        lambda x, w: functional.linear(w, x),
        lambda x, w: functional.linear(x.double(), w.double()),
    ],
    ids=["read by something else", "computed", "input and weight", "transposed", "as the input", "another type"],
)
def test_what_is_no_plain_linear_is_left_alone(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Alone(compute, torch.eye(SIZE))
    before, after = cut(module, x()), fused(module, x())
    assert [piece.key for piece in after.pieces] == [piece.key for piece in before.pieces]
    assert after.sources == before.sources


def test_other_types_are_left_alone() -> None:
    module = Alone(functional.linear, torch.eye(SIZE).half())
    assert packed(fused(module, x().half())) == []


class Gated(nn.Module):
    """Attention whose gate is computed with its queries and used behind it, in another piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.gate = (nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (one(x).view(len(x), HEADS, -1) for one in (self.first, self.second, self.third))
        gate = self.gate(x)
        return torch.ops.streamengine.attention(*heads).flatten(1) * gate


def test_what_another_piece_takes_keeps_its_strides() -> None:
    module = Gated()
    before, after = cut(module, x()), fused(module, x())
    assert len(packed(after)) == 4
    assert after.pieces[-1].key == before.pieces[-1].key


def test_merging_changes_no_bit() -> None:
    """Against the same weights packed one by one."""
    module = Layer(bias=True)
    given = x()
    whole = pack(torch.cat([module.gate.weight, module.up.weight]))
    merged = torch.ops.streamengine.linear(given, whole, torch.cat([module.gate.bias, module.up.bias]), 96)
    for one, part in zip((module.gate, module.up), merged.split(48, -1), strict=True):
        assert torch.equal(torch.ops.streamengine.linear(given, pack(one.weight), one.bias, 48), part)
