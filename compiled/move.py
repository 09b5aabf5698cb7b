"""Pieces that were traced on the CPU → the same for another device, which need not be there.

A model is traced where its skeleton is, which takes no memory of the device that will run it. Little in a graph names
a device: the arguments of factories, the kind of autocast, and the values that were noted.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from compiled.split import Piece, Split, key_of

_CPU = torch.device("cpu")


def move(parts: Split, where: torch.device) -> Split:
    """``parts`` on ``where``. Pieces that were equal stay equal."""
    moved = {piece.key: _moved(piece.graph, where) for piece in parts.unique}
    keys = {key: key_of(graph.graph) for key, graph in moved.items()}
    calls = tuple(
        replace(call, graph=moved[call.key], key=keys[call.key]) if isinstance(call, Piece) else call
        for call in parts.calls
    )
    return replace(parts, calls=calls)


def _moved(graph: fx.GraphModule, where: torch.device) -> fx.GraphModule:
    module = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and node.op == "call_function" and _takes_sizes(node):
            node.kwargs = {"device": _CPU, **node.kwargs}  # a factory, which may leave it to the default
        node.args = map_aggregate(node.args, lambda named: _named(named, where))
        node.kwargs = map_aggregate(node.kwargs, lambda named: _named(named, where))
        if value is not None:
            node.meta["example_value"] = map_aggregate(value, lambda noted: _there(noted, where))
    module.recompile()
    return module


def _takes_sizes(node: fx.Node) -> bool:
    """And no tensors."""
    sizes = int | torch.SymInt
    return all(isinstance(given.meta.get("example_value"), sizes) for given in node.all_input_nodes)


def _named(value: Any, where: torch.device) -> Any:
    if isinstance(value, torch.device):
        return where if value == _CPU else value
    return where.type if isinstance(value, str) and value == "cpu" else value


def _there(value: Any, where: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode:  # type: ignore[attr-defined,unused-ignore]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where)
