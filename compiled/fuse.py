"""The linear layers of a cut graph, on packed weights, and merged where they have the same input.

Linears are found by what they do, never by their names: a call of `torch.nn.functional.linear` whose weight is
a parameter of the model. Those of one piece that have the same input become one, on their weights one above the
other, and its result is split. An embedding whose weight some linear has too reads its rows out of the packed one.
Where a device's own kernels take weights as they are, nothing is packed.
Left alone is what does not fit: other types and devices, and weights that anything else reads.
"""

import copy
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional

from compiled.linear.op import DTYPES, packed_rows, packed_shape
from compiled.recipe import Parameter, Source
from compiled.split import Piece, Split, key_of


def fuse(parts: Split, *, packing: bool = True) -> Split:
    """``parts`` with its linears merged and, if ``packing``, on packed weights. Pieces that were equal stay equal."""
    kinds = {piece.key: _Kind([call for call in parts.pieces if call.key == piece.key]) for piece in parts.unique}
    packable = _packable(parts, kinds.values()) if packing else None
    uses = Counter(name for call in parts.calls for name in call.inputs)
    single = {name for name, source in parts.sources.items() if isinstance(source, Parameter) and uses[name] == 1}
    read_by_pieces = {name for piece in parts.pieces for name in piece.inputs}
    rewritten = {key: _rewrite(kind, packable, single, read_by_pieces) for key, kind in kinds.items()}
    sources = dict(parts.sources)
    calls = tuple(
        rewritten[call.key].in_place_of(call, sources) if isinstance(call, Piece) else call for call in parts.calls
    )
    used = {name for call in calls for name in call.inputs} | {parts.output}
    return replace(parts, calls=calls, sources={name: source for name, source in sources.items() if name in used})


class _Kind:
    """All calls of one piece. ``inputs[i]`` is how its argument i is called in them, ``outputs[i]`` its result i."""

    def __init__(self, calls: Sequence[Piece]) -> None:
        self.graph, self.key = calls[0].graph, calls[0].key
        self.inputs = [set(names) for names in zip(*(call.inputs for call in calls), strict=True)]
        self.outputs = [set(names) for names in zip(*(call.outputs for call in calls), strict=True)]


def _packable(parts: Split, kinds: Collection[_Kind]) -> set[str]:
    """Weights that linears read and nothing else but embeddings, wherever they are read."""
    roles: dict[str, set[str]] = {name: set() for name, one in parts.sources.items() if isinstance(one, Parameter)}
    for kind in kinds:
        for names, node in zip(kind.inputs, _placeholders(kind.graph.graph), strict=True):
            for name in names & roles.keys():
                roles[name] |= {_role(node, user) for user in node.users}
    for call in parts.calls:
        for name in () if isinstance(call, Piece) else call.inputs:
            roles.get(name, set()).add("attention")
    packable = {name for name, found in roles.items() if "linear" in found and found <= {"linear", "embedding"}}
    # What one call of a piece takes packed, all of its calls must.
    while mixed := {
        name for kind in kinds for names in kind.inputs if not names <= packable for name in names & packable
    }:
        packable -= mixed
    return packable


def _role(weight: fx.Node, user: fx.Node) -> str:
    value = weight.meta["example_value"]
    fits = isinstance(value, Tensor) and value.dim() == 2 and value.dtype in DTYPES and value.device.type == "cpu"
    if not fits or sum(argument is weight for argument in (*user.args, *user.kwargs.values())) != 1:
        return "other"
    if user.target is functional.linear and _operands(user)[1] is weight:
        return "linear"
    if user.target is functional.embedding:
        _, table, *options = user.args
        max_norm = dict(zip(("padding_idx", "max_norm"), options, strict=False)).get(
            "max_norm", user.kwargs.get("max_norm")
        )
        if table is weight and max_norm is None:
            return "embedding"
    return "other"


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), linear.args, strict=False)), **linear.kwargs}
    return given["input"], given["weight"], given.get("bias")


@dataclass(frozen=True)
class _Argument:
    """An argument of a rewritten piece: these of the original's, merged."""

    merged: tuple[int, ...]
    packed: bool = False


@dataclass(frozen=True)
class _Rewritten:
    """A piece's new graph and its arguments."""

    graph: fx.GraphModule
    key: str
    arguments: tuple[_Argument, ...]

    def in_place_of(self, call: Piece, sources: dict[str, Source]) -> Piece:
        """``call`` of this graph. Its new parameters are added to ``sources``."""
        inputs = tuple(self._value(argument, call, sources) for argument in self.arguments)
        return replace(call, graph=self.graph, key=self.key, inputs=inputs)

    def _value(self, argument: _Argument, call: Piece, sources: dict[str, Source]) -> str:
        names = [call.inputs[i] for i in argument.merged]
        name = "+".join(names)
        if argument.packed or len(names) > 1:
            merged = [sources[one] for one in names]
            tensors = tuple(tensor for one in merged if isinstance(one, Parameter) for tensor in one.names)
            sources[name] = Parameter(tensors, packed=argument.packed)
        return name


def _rewrite(kind: _Kind, packable: set[str] | None, single: set[str], read_by_pieces: set[str]) -> _Rewritten:
    packed = None if packable is None else {i for i, names in enumerate(kind.inputs) if names <= packable}
    mergeable = {i for i, names in enumerate(kind.inputs) if names <= single}
    rewritten = _Rewriting(kind.graph, packed, mergeable).finish()
    # What is split off a merged result has other strides. Pieces are compiled for those that they were traced with.
    pinned = [i for i, names in enumerate(kind.outputs) if names & read_by_pieces]
    before, after = _example_outputs(kind.graph), _propagated_outputs(rewritten.graph) if pinned else ()
    if any(_strides(before[i]) != _strides(after[i]) for i in pinned):
        return _Rewriting(kind.graph, packed, set()).finish()
    return rewritten


class _Rewriting:
    """One piece's graph while it is rewritten. ``packed`` and ``mergeable`` are numbers of its arguments; without
    ``packed`` weights stay as they are, and linears are merged all the same."""

    def __init__(self, graph: fx.GraphModule, packed: set[int] | None, mergeable: set[int]) -> None:
        self._module = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        self._graph = self._module.graph
        placeholders = _placeholders(self._graph)
        self._numbers = {node: i for i, node in enumerate(placeholders)}
        self._arguments = {node: _Argument((i,)) for i, node in enumerate(placeholders)}
        self._packing = packed is not None
        self._packed = {node for node in placeholders if self._numbers[node] in (packed or ())}
        self._mergeable = {node for node in placeholders if self._numbers[node] in mergeable and len(node.users) == 1}
        self._made: dict[_Argument, fx.Node] = {}

    def finish(self) -> _Rewritten:
        for group in self._groups():
            self._merge(group)
        for node in [
            node for node in self._graph.nodes if node.target is functional.embedding and node.args[1] in self._packed
        ]:
            self._look_up(node)
        for node in self._numbers:
            if not node.users:
                self._graph.erase_node(node)
        arguments = tuple(self._arguments[node] for node in _placeholders(self._graph))
        self._module.recompile()
        return _Rewritten(self._module, key_of(self._graph), arguments)

    def _groups(self) -> list[list[fx.Node]]:
        """Linears that become one: of the same input, with biases or without."""
        groups: dict[object, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.target is functional.linear:
                given, weight, bias = _operands(node)
                fits = self._mergeable.issuperset({weight} if bias is None else {weight, bias})
                if weight in self._packed or (fits and not self._packing):
                    groups.setdefault((given, bias is None) if fits else node, []).append(node)
        return [group for group in groups.values() if self._packing or len(group) > 1]

    def _merge(self, group: list[fx.Node]) -> None:
        operands = [_operands(node) for node in group]
        given, _, bias = operands[0]
        weight = self._argument([weight for _, weight, _ in operands], packed=self._packing)
        if bias is not None and len(group) > 1:
            bias = self._argument([bias for _, _, bias in operands if bias is not None], packed=False)
        sizes = [int(weight.meta["example_value"].shape[0]) for _, weight, _ in operands]
        with self._graph.inserting_before(group[0]):
            whole = (
                self._call(torch.ops.streamengine.linear.default, (given, weight, bias, sum(sizes)), group[0])
                if self._packing
                else self._call(functional.linear, (given, weight, bias), group[0])
            )
            split = self._call(torch.split, (whole, sizes, -1), group[0]) if len(group) > 1 else None
            results = [
                whole if split is None else self._call(operator.getitem, (split, i), node)
                for i, node in enumerate(group)
            ]
        for node, result in zip(group, results, strict=True):
            node.replace_all_uses_with(result)
            self._graph.erase_node(node)

    def _look_up(self, node: fx.Node) -> None:
        rows, weight, *_ = node.args
        assert isinstance(weight, fx.Node)
        packed = self._argument([weight], packed=True)
        with self._graph.inserting_before(node):
            result = self._call(packed_rows, (packed, rows, int(weight.meta["example_value"].shape[1])), node)
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)

    def _argument(self, nodes: Sequence[fx.Node], packed: bool) -> fx.Node:
        """The new placeholder of ``nodes``, merged."""
        argument = _Argument(tuple(self._numbers[node] for node in nodes), packed)
        if argument not in self._made:
            examples = [node.meta["example_value"] for node in nodes]
            with self._graph.inserting_before(nodes[0]):
                made = self._made[argument] = self._graph.placeholder("_".join(node.name for node in nodes))
            made.meta["example_value"] = _merged_example(examples, packed)
            self._arguments[made] = argument
        return self._made[argument]

    def _call(self, target: Any, arguments: tuple[Any, ...], place: fx.Node) -> fx.Node:
        """A new node that stands where ``place`` stood in the model's code."""
        node = self._graph.call_function(target, arguments)
        node.meta = {name: value for name, value in place.meta.items() if name != "example_value"}
        return node


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _merged_example(examples: Sequence[Any], packed: bool) -> Tensor:
    rows, first = sum(int(example.shape[0]) for example in examples), examples[0]
    shape = packed_shape(rows, int(first.shape[1]), first.dtype) if packed else (rows, *first.shape[1:])
    with first.fake_mode:
        return torch.empty(shape, dtype=first.dtype, device=first.device)


def _example_outputs(module: fx.GraphModule) -> list[Any]:
    return [node.meta["example_value"] for node in next(iter(reversed(module.graph.nodes))).args[0]]


def _propagated_outputs(module: fx.GraphModule) -> Sequence[Any]:
    examples = [node.meta["example_value"] for node in _placeholders(module.graph)]
    mode = next(example.fake_mode for example in examples if isinstance(example, Tensor))
    with enable_python_dispatcher():  # as Dynamo does: without, torch 2.11 binds symbols in some operators
        return FakeTensorProp(module, mode).propagate_dont_convert_inputs(*examples)


def _strides(value: Any) -> list[str]:
    """Of the dimensions that have any; symbols as text, because comparing them would bind them."""
    if not isinstance(value, Tensor):
        return []
    return [str(stride) for size, stride in zip(value.shape, value.stride(), strict=True) if str(size) != "1"]
