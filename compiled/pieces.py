"""Compile each unique piece once and emit the whole forward pass as a flat list of calls.

Dynamo traces the model once with the number of tokens and of logit rows left symbolic, `split` cuts the
graph, Inductor compiles one piece of each kind, and `Program` replays the list. Layers exist only
here: every call has its own parameters bound beforehand, so nothing is looked up by name in a step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._inductor import standalone_compile
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from compiled.model import forward
from compiled.split import Attention, Piece, Split, split
from compiled.step import LoadError

SMALLEST = 2
"""Fewest tokens and fewest logit rows of a compiled call: Dynamo takes a size of 1 for a constant."""

_TRACED_TOKENS = 16
_TRACED_ROWS = 4

Report = Callable[[str, float, float], None]


class LayerAttention(Protocol):
    """The attention of one planned step."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """``out_THD`` of layer ``layer``."""
        ...


def check_compiler() -> None:
    """Raises LoadError where Inductor would find no C++ compiler, at the end of a long trace."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise LoadError("a C++ compiler is needed to compile: install g++, or use --eager") from None


@dataclass(frozen=True)
class CompileTimes:
    """Seconds of each stage, and how much there was to do."""

    trace: float
    split: float
    compile: float
    pieces: int
    unique: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One entry of the list: registers ``arguments`` → ``function`` → registers ``results``; then ``dead``
    registers are emptied, so that memory is given back as soon as in eager code."""

    function: Callable[..., Any] | None
    layer: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]


class Program:
    """A compiled forward pass. Not thread-safe; at least `SMALLEST` tokens and rows a call."""

    def __init__(self, calls: Sequence[_Call], registers: list[Any], fed: dict[int, str], output: int) -> None:
        self._calls = tuple(calls)
        self._registers = registers
        self._fed = tuple(fed.items())
        self._output = output

    def __call__(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: LayerAttention) -> Tensor:
        """Logits ``[R, V]`` of the tokens at indices ``rows_R``."""
        given = {"ids": ids_T, "positions": positions_T, "rows": rows_R, "T": len(ids_T), "R": len(rows_R)}
        registers = list(self._registers)
        for register, name in self._fed:
            registers[register] = given[name]
        for call in self._calls:
            arguments = [registers[i] for i in call.arguments]
            if call.function is None:
                query, key, value = arguments
                registers[call.results[0]] = attention.attend(query, key, value, call.layer)
            else:
                for register, value in zip(call.results, call.function(*arguments), strict=True):
                    registers[register] = value
            for register in call.dead:
                registers[register] = None
        return registers[self._output]


def build(module: nn.Module, report: Report) -> tuple[Program, Split, CompileTimes]:
    """Trace, split and compile ``module``. Whatever the depth, only unique pieces are compiled."""
    started = time.perf_counter()
    report("trace", 0, 0)
    traced, values = trace(module)
    traced_at = time.perf_counter()
    parts = split(traced)
    split_at = time.perf_counter()
    compiled = {}
    for done, piece in enumerate(parts.unique):
        report("compile", done, len(parts.unique))
        compiled[piece.key] = _compile(piece)
    report("compile", len(parts.unique), len(parts.unique))
    times = CompileTimes(
        trace=traced_at - started,
        split=split_at - traced_at,
        compile=time.perf_counter() - split_at,
        pieces=len(parts.pieces),
        unique=len(parts.unique),
    )
    return _emit(parts, compiled, values), parts, times


def trace(module: nn.Module) -> tuple[fx.GraphModule, dict[str, Any]]:
    """One graph of the whole forward pass, and for each placeholder its parameter, or the name of what is
    fed to it in each step: ``ids``, ``positions``, ``rows``, ``T`` or ``R``."""
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

        def called(*values: Any) -> tuple[Tensor]:
            arguments.extend(values)
            return (torch.empty(0),)

        return called

    def run(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return forward(module, ids, positions, rows, None)

    # Dynamo remembers the models that it has traced here before and would turn what differs, such as an
    # epsilon, into an input. Each model is traced as if it were the first, and nothing of it is kept.
    alone = torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True)
    with torch.no_grad(), alone:
        torch.compile(run, backend=capture, fullgraph=True)(**inputs)
    torch._dynamo.reset_code(run.__code__)
    (graph,) = graphs
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = dict(zip((node.name for node in placeholders), arguments, strict=True))
    return graph, _name_fed(placeholders, values, inputs)


def _name_fed(placeholders: list[fx.Node], values: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Any]:
    """``values`` with the step's own inputs replaced by their names."""
    fed = {node.name: name for node in placeholders for name, tensor in inputs.items() if values[node.name] is tensor}
    sizes = {}
    for node in placeholders:
        if node.name in fed:
            sizes[str(node.meta["example_value"].shape[0])] = "R" if fed[node.name] == "rows" else "T"
    for node in placeholders:
        if isinstance(node.meta["example_value"], torch.SymInt):
            fed[node.name] = sizes[str(node.meta["example_value"])]
    return values | fed


def _compile(piece: Piece) -> Callable[..., Any]:
    inputs = [node.meta["example_value"] for node in piece.graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        return standalone_compile(piece.graph, inputs, dynamic_shapes="from_graph", options={})


def _emit(parts: Split, compiled: dict[str, Callable[..., Any]], values: dict[str, Any]) -> Program:
    numbers: dict[str, int] = {name: i for i, name in enumerate(parts.inputs)}
    for call in parts.calls:
        for name in call.outputs if isinstance(call, Piece) else (call.output,):
            numbers[name] = len(numbers)
    fed = {numbers[name]: value for name, value in values.items() if isinstance(value, str)}
    registers: list[Any] = [None] * len(numbers)
    for name, value in values.items():
        if not isinstance(value, str):
            registers[numbers[name]] = value
    calls = []
    alive = {numbers[parts.output], *(numbers[name] for name in parts.inputs)}
    for call in reversed(parts.calls):
        arguments = tuple(numbers[name] for name in _arguments(call))
        dead = tuple(dict.fromkeys(argument for argument in arguments if argument not in alive))
        alive.update(dead)
        calls.append(_entry(call, compiled, numbers, arguments, dead))
    return Program(calls[::-1], registers, fed, numbers[parts.output])


def _entry(
    call: Piece | Attention,
    compiled: dict[str, Callable[..., Any]],
    numbers: dict[str, int],
    arguments: tuple[int, ...],
    dead: tuple[int, ...],
) -> _Call:
    if isinstance(call, Attention):
        return _Call(None, call.layer, arguments, (numbers[call.output],), dead)
    return _Call(compiled[call.key], -1, arguments, tuple(numbers[name] for name in call.outputs), dead)


def _arguments(call: Piece | Attention) -> tuple[str, ...]:
    return call.inputs if isinstance(call, Piece) else (call.query, call.key, call.value)
