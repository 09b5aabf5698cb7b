"""A module → one graph of its whole forward pass, by Dynamo, with the numbers of tokens and logit rows symbolic.

The module's parameters may be uninitialised memory: nothing looks at their numbers.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from compiled.model import forward
from compiled.recipe import Fed, Parameter, Source
from compiled.skeleton import named_tensors
from compiled.step import LoadError

_TRACED_TOKENS = 16
_TRACED_ROWS = 4


@dataclass(frozen=True)
class Traced:
    """``given`` says for each placeholder of ``graph`` how its value is called and where it comes from: parameters
    and buffers are `Parameter` sources, called by their own names."""

    graph: fx.GraphModule
    given: Mapping[str, tuple[str, Source]]


def trace(module: nn.Module) -> Traced:
    """The forward pass of ``module``.

    Raises:
        LoadError: the model's code cannot be traced as one graph.
    """
    inputs = {
        "ids": torch.zeros(_TRACED_TOKENS, dtype=torch.long),
        "positions": torch.arange(_TRACED_TOKENS),
        "rows": torch.arange(_TRACED_ROWS),
    }
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 0)
    graphs: list[fx.GraphModule] = []
    arguments: list[Any] = []

    def capture(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        if len(results := next(iter(reversed(graph.graph.nodes))).args[0]) != 1:
            raise ValueError(f"it has {len(results) - 1} results beside its logits")
        if found := next(filter(_is_read, graph.graph.nodes), None):
            raise ValueError(f"sizes in it depend on numbers that are in tensors ({found.name})")

        def called(*values: Any) -> tuple[Tensor]:
            arguments.extend(values)
            return (torch.empty(0),)

        return called

    def run(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return forward(module, ids, positions, rows, None)

    # Dynamo remembers the models that it has traced here before and would turn what differs, such as an
    # epsilon, into an input. Each model is traced as if it were the first, and nothing of it is kept.
    alone = torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True)
    try:
        with torch.no_grad(), alone, warnings.catch_warnings():
            # transformers caches a look at torch's version, which cannot change while we trace.
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
            torch.compile(run, backend=capture, fullgraph=True)(**inputs)
    except Exception as error:  # Dynamo raises a dozen kinds, and whatever the model's code raises
        cause = getattr(error, "inner_exception", None) or error.__cause__ or error  # `capture` raised it, or a model
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise LoadError(f"{type(module).__name__} is no single graph and needs --eager: {reason}") from error
    torch._dynamo.reset_code(run.__code__)
    (graph,) = graphs
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, arguments, strict=True))
    return Traced(graph, _held(module, values) | _fed(values, inputs))


def _is_read(node: fx.Node) -> bool:
    """Whether it is a number that is in a tensor, or has a size that is one."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt | Tensor) and bool(free_unbacked_symbols(value))


def _held(module: nn.Module, values: dict[fx.Node, Any]) -> dict[str, tuple[str, Source]]:
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    return {
        node.name: (names[id(value)], Parameter((names[id(value)],)))
        for node, value in values.items()
        if id(value) in names
    }


def _fed(values: dict[fx.Node, Any], inputs: dict[str, Tensor]) -> dict[str, tuple[str, Source]]:
    """The placeholders of the step's own inputs and of their sizes."""
    fed = {node: name for node, value in values.items() for name, tensor in inputs.items() if value is tensor}
    sizes = {str(node.meta["example_value"].shape[0]): "R" if name == "rows" else "T" for node, name in fed.items()}
    for node in values:
        if isinstance(node.meta["example_value"], torch.SymInt):
            fed[node] = sizes[str(node.meta["example_value"])]
    return {node.name: (node.name, Fed(name)) for node, name in fed.items()}
