"""Compiles each unique piece of a model once: for symbolic numbers of tokens and logit rows, without any weight."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor import standalone_compile
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

from compiled import inductor
from compiled.artifacts import Cache
from compiled.inductor import Call, Generated, NotPortable, Written
from compiled.split import Split
from compiled.step import LoadError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """``functions`` by the keys of the pieces; ``generated`` are those that were compiled just now, to be kept, and
    ``found`` those that were there. A piece of ``homebound`` runs in this process only."""

    functions: dict[str, Call] = field(default_factory=dict)
    generated: dict[str, Generated] = field(default_factory=dict)
    found: dict[str, Generated] = field(default_factory=dict)
    homebound: dict[str, Call] = field(default_factory=dict)


def check_compiler(where: torch.device) -> None:
    """Raises LoadError where Inductor would find no compiler for ``where``, at the end of a long trace."""
    if where.type == "cuda" and not has_triton():
        raise LoadError("Triton is needed to compile for a GPU: pip install triton, or use --eager")
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise LoadError("a C++ compiler is needed to compile: install g++, or use --eager") from None


def compile_pieces(parts: Split, cache: Cache, report: Callable[[str, float, float], None]) -> Compiled:
    """A function for each unique piece, taken from ``cache`` where it has one."""
    compiled, written = Compiled(), dict[str, Written]()
    for done, piece in enumerate(parts.unique):
        report("compile", done, len(parts.unique) + 1)
        if (stored := cache.piece(piece.key)) is not None:
            compiled.functions[piece.key], compiled.found[piece.key] = stored
        else:
            try:
                fresh = fx.GraphModule(piece.graph, copy.deepcopy(piece.graph.graph))
                written[piece.key] = inductor.write(fresh, example_inputs(piece.graph), cache.workshop)
            except NotPortable as reason:
                log.warning("%s is compiled at each start: %s", piece.name, reason)
                compiled.homebound[piece.key] = compiled.functions[piece.key] = _compile_at_home(piece.graph)
            except Exception as error:  # Inductor raises whatever it trips over in a model's code
                line = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise LoadError(f"{piece.name} cannot be compiled: {line}; use --eager, and report this") from error
    report("compile", len(parts.unique), len(parts.unique) + 1)
    compiled.generated.update(inductor.build(written, cache.workshop))
    compiled.functions.update({key: inductor.load(one, cache.triton) for key, one in compiled.generated.items()})
    report("compile", len(parts.unique) + 1, len(parts.unique) + 1)
    return compiled


def example_inputs(graph: fx.GraphModule) -> list[Any]:
    """Fake tensors and symbolic sizes of ``graph``'s placeholders."""
    return [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]


def _compile_at_home(graph: fx.GraphModule) -> Call:
    with torch.no_grad():
        function = standalone_compile(graph, example_inputs(graph), dynamic_shapes="from_graph", options={})

    def call(arguments: list[Any]) -> Sequence[Any]:
        given = tuple(arguments)
        arguments.clear()
        made: Sequence[Any] = function(*given)
        return made

    return call
