"""One traced graph → pieces that lie between attention calls.

The graph is cut at every ``streamengine::attention`` node. What lies between two cuts becomes a piece: a
graph of its own whose inputs are the values that it takes from outside. Two pieces that do the same
thing have the same ``key``, whatever their layer; layers enter only where the call list is built.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compiled.attention import operator
from compiled.recipe import Attention, Source


@dataclass(frozen=True)
class Piece:
    """A stretch of the graph without attention.

    ``inputs`` and ``outputs`` name values of the whole forward pass, in the order of the piece's own
    arguments and results. ``key`` is a hash of what it computes; ``name`` says where it stands.
    """

    name: str
    key: str
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """A whole forward pass as calls in order. ``sources`` says where the values come from that no call makes,
    ``output`` is the result, and ``constants`` are what `Constant` sources point to."""

    calls: tuple[Piece | Attention, ...]
    sources: Mapping[str, Source]
    output: str
    constants: tuple[Tensor, ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        return [call for call in self.calls if isinstance(call, Piece)]

    @property
    def unique(self) -> list[Piece]:
        """The first piece of each key."""
        return list({piece.key: piece for piece in reversed(self.pieces)}.values())[::-1]


def split(traced: fx.GraphModule, given: Mapping[str, tuple[str, Source]]) -> Split:
    """Cut ``traced``, a Dynamo graph with one tensor as its result, at its attention nodes. ``given`` says for each
    placeholder how its value is called and where it comes from."""
    traced.graph.eliminate_dead_code(_has_effect)
    nodes = list(traced.graph.nodes)
    names = {node: given[node.name][0] if node.name in given else node.name for node in nodes}
    (result,) = nodes[-1].args[0]
    attention = next((_path(node) for node in nodes if _is_attention(node)), [])
    calls: list[Piece | Attention] = []
    layer = 0
    for run in _runs(nodes):
        if _is_attention(run[0]):
            query, key, value, *sinks = (names[argument] for argument in run[0].args if argument is not None)
            calls.append(Attention(layer, query, key, value, names[run[0]], *sinks))
            layer += 1
        else:
            calls.append(_piece(traced, run, _name(run, attention), names))
    used = {name for call in calls for name in call.inputs} | {names[result]}
    return Split(tuple(calls), {name: source for name, source in given.values() if name in used}, names[result])


def _has_effect(node: fx.Node) -> bool:
    """Whether ``node`` may change a tensor, so that it counts though nobody takes its result: ``scatter_``, ``add_``,
    ``x[i] = y``, ``out=``. torch's own answer knows some of these only."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("setitem", "__setitem__") or "out" in node.kwargs or node.is_impure()


def _runs(nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Attention nodes alone, and the stretches between them."""
    run: list[fx.Node] = []
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_attention(node):
            if run:
                yield run
            yield [node]
            run = []
        else:
            run.append(node)
    if run:
        yield run


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in operator.TARGETS


def _piece(traced: fx.GraphModule, run: list[fx.Node], name: str, names: Mapping[fx.Node, str]) -> Piece:
    run = _with_own_sizes(run)
    inside = set(run)
    inputs = list(dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in inside))
    outputs = [node for node in run if not _is_size(node) and any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta = dict(node.meta)
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(
        name=name,
        key=key_of(graph),
        graph=fx.GraphModule(traced, graph),
        inputs=tuple(names[node] for node in inputs),
        outputs=tuple(names[node] for node in outputs),
    )


def _with_own_sizes(run: list[fx.Node]) -> list[fx.Node]:
    """``run`` behind all that it needs of sizes computed from sizes, such as tokens times experts. Dynamo writes each
    of them down once, and a layer that took it from another one would not be like that one."""
    inside, sizes = {node for node in run if not _is_size(node)}, list[fx.Node]()

    def take(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in inside and _is_size(source):
                inside.add(source)
                take(source)
                sizes.append(source)

    for node in run:
        if not _is_size(node):
            take(node)
    return sizes + [node for node in run if not _is_size(node)]


def _is_size(node: fx.Node) -> bool:
    values = [one.meta.get("example_value") for one in (node, *node.all_input_nodes)]
    return node.op == "call_function" and all(isinstance(value, torch.SymInt) for value in values)


def key_of(graph: fx.Graph) -> str:
    """Equal for graphs that differ in the names of their nodes and symbols only."""
    normal = _Normaliser()
    digest = hashlib.sha256()
    for node in graph.nodes:
        digest.update(normal.describe(node).encode())
    return digest.hexdigest()[:16]


class _Normaliser:
    """Writes nodes as text in which nodes and symbols are numbered by first appearance."""

    def __init__(self) -> None:
        self._nodes: dict[fx.Node, int] = {}
        self._symbols: dict[str, str] = {}

    def describe(self, node: fx.Node) -> str:
        self._nodes[node] = len(self._nodes)
        if node.op == "placeholder":
            return f"placeholder {self._value(node.meta.get('example_value'))}\n"
        return f"{node.op} {self._target(node)} {self._argument(node.args)} {self._argument(node.kwargs)}\n"

    def _target(self, node: fx.Node) -> str:
        if isinstance(node.target, str):
            return node.target
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{self._nodes[value]}"
        if isinstance(value, list | tuple):
            return f"({','.join(self._argument(item) for item in value)})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._argument(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{self._argument((value.start, value.stop, value.step))}"
        return repr(value)

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape = ",".join(self._size(size) for size in value.shape)
            stride = ",".join(self._size(step) for step in value.stride())
            return f"{value.dtype} {value.device} [{shape}] [{stride}]"
        return self._size(value)

    def _size(self, size: Any) -> str:
        if isinstance(size, int):
            return str(size)
        text = str(size)
        expression = getattr(getattr(size, "node", None), "expr", None)
        for symbol in sorted(map(str, getattr(expression, "free_symbols", ())), key=len, reverse=True):
            text = text.replace(symbol, self._symbols.setdefault(symbol, f"$[{len(self._symbols)}]"))
        return text


def _path(node: fx.Node) -> list[str]:
    """The module path that Dynamo noted for ``node``: ``L['module'].model.layers[7].mlp`` →
    ``["model", "layers", "7", "mlp"]``; empty for code of the outermost module itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return []
    path = str(next(reversed(stack.values()))[0])
    return re.findall(r"\w+", path)[2:]


def _name(run: list[fx.Node], attention: list[str]) -> str:
    """Where the piece stands, e.g. ``layers.7: o_proj+mlp | layers.8: input_layernorm+q_proj+k_proj``.

    ``attention`` is the path of a module that calls attention; it lies on both sides of a cut, so its
    children are named in place of itself.
    """
    places: dict[str, dict[str, None]] = {}
    for node in run:
        place, part = _place(_path(node), attention)
        if part:
            places.setdefault(place, {})[part] = None
    return " | ".join(f"{place}: {'+'.join(parts)}" if place else "+".join(parts) for place, parts in places.items())


def _place(path: list[str], attention: list[str]) -> tuple[str, str]:
    """``(layer, the layer's child that the node belongs to)``, ``("", module)`` outside of the layers."""
    number = next((i for i, step in enumerate(path) if step.isdigit()), None)
    if number is None:
        return "", path[-1] if path else ""
    inner = path[number + 1 :]
    if inner[:1] == attention[-1:]:
        inner = inner[1:]
    return f"{path[number - 1]}.{path[number]}", inner[0] if inner else ""
