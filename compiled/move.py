"""Pieces that were traced on the CPU → the same for another device, which need not be there.

A model is traced where its skeleton is, without memory on the device that will run it. What names the device in a
graph is few: factories' arguments, the kind of autocast, and the tensors that come in. The rest follows from these, and
is computed anew with fake tensors; so what would stay on the CPU is seen here.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from compiled.split import Piece, Split, key_of
from compiled.step import LoadError

_CPU = torch.device("cpu")


def move(parts: Split, where: torch.device) -> Split:
    """``parts`` on ``where``. Pieces that were equal stay equal.

    Raises:
        LoadError: a piece computes something on the CPU all the same.
    """
    moved = {piece.key: _moved(piece, where) for piece in parts.unique}
    keys = {key: key_of(graph.graph) for key, graph in moved.items()}
    calls = tuple(
        replace(call, graph=moved[call.key], key=keys[call.key]) if isinstance(call, Piece) else call
        for call in parts.calls
    )
    return replace(parts, calls=calls)


def _moved(piece: Piece, where: torch.device) -> fx.GraphModule:
    module = fx.GraphModule(piece.graph, copy.deepcopy(piece.graph.graph))
    inputs = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_there(node.meta["example_value"], where))
        else:
            node.args = map_aggregate(node.args, lambda value: _named(value, where))
            node.kwargs = map_aggregate(node.kwargs, lambda value: _named(value, where))
    mode = next(value.fake_mode for value in inputs if isinstance(value, Tensor))
    with torch.no_grad(), mode:
        _Examples(module).run(*inputs)
    for node in module.graph.nodes:
        for value in _tensors(node.meta.get("example_value")):
            if value.device.type == "cpu" and value.dim():
                raise LoadError(f"{piece.name} computes {node.name} on the CPU and needs --eager on {where.type}")
    module.recompile()
    return module


class _Examples(fx.Interpreter):
    """Notes what each node gives."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = made
        return made


def _named(value: Any, where: torch.device) -> Any:
    if value == _CPU and isinstance(value, torch.device):
        return where
    return where.type if isinstance(value, str) and value == "cpu" else value


def _there(value: Any, where: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
