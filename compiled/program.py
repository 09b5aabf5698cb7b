"""A recipe with weights in it: the whole forward pass as a flat list of calls.

Layers exist only here: every call has its own parameters at hand, so nothing is looked up by name in a step.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compiled.inductor import Call
from compiled.linear.op import Arena, pack
from compiled.recipe import Attention, Fed, Parameter, Recipe, Run

SMALLEST = 1
"""Fewest tokens and fewest logit rows of a call. Dynamo would take a size of 1 for a constant, but is shown another
(`compiled.trace`), and what it wrote with a symbol in that place holds for 1 as well (`compiled.selfcheck`)."""


class PlannedAttention(Protocol):
    """The attention of one planned step."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """``out_THE`` of layer ``layer``."""
        ...


class Forward(Protocol):
    """A whole forward pass, compiled or not."""

    def __call__(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: PlannedAttention) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the list: registers ``arguments`` → ``function`` (None: attention) → registers ``results``.
    ``dead`` registers are emptied before, so that memory is given back as soon as in eager code."""

    call: Run | Attention
    function: Call | None
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]

    @property
    def layer(self) -> int:
        """Of an attention."""
        assert isinstance(self.call, Attention)
        return self.call.layer


class Program:
    """A compiled forward pass. Not thread-safe; at least `SMALLEST` tokens and rows a call.

    ``registers`` hold the weights and constants, and None where a step's values go; ``fed`` says which of them a step
    begins with, ``output`` which holds the logits.
    """

    def __init__(
        self, entries: Sequence[Entry], registers: Sequence[Any], fed: Sequence[tuple[int, str]], output: int
    ) -> None:
        self.entries = tuple(entries)
        self.registers = tuple(registers)
        self.fed = tuple(fed)
        self.output = output

    def with_entries(self, entries: Sequence[Entry]) -> "Program":
        """The same pass through other functions."""
        return Program(entries, self.registers, self.fed, self.output)

    def begin(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor) -> list[Any]:
        """The registers before the first entry of a step."""
        given = {"ids": ids_T, "positions": positions_T, "rows": rows_R, "T": len(ids_T), "R": len(rows_R)}
        registers = list(self.registers)
        for register, name in self.fed:
            registers[register] = given[name]
        return registers

    def __call__(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: PlannedAttention) -> Tensor:
        """Logits ``[R, V]`` of the tokens at indices ``rows_R``."""
        registers = self.begin(ids_T, positions_T, rows_R)
        for entry in self.entries:
            arguments = [registers[i] for i in entry.arguments]
            for register in entry.dead:
                registers[register] = None
            if entry.function is None:
                query, key, value, *sinks = arguments
                registers[entry.results[0]] = attention.attend(query, key, value, entry.layer, *sinks)
            else:
                for register, made in zip(entry.results, entry.function(arguments), strict=True):
                    registers[register] = made
        return registers[self.output]


def bind(recipe: Recipe, functions: Mapping[str, Call], weights: MutableMapping[str, Tensor]) -> Program:
    """The program of ``recipe``. ``weights`` are taken out of their mapping as they are used for the last time, so
    that what is merged or packed is not kept beside its copy."""
    numbers = {name: i for i, name in enumerate(recipe.sources)}
    for call in recipe.calls:
        for name in call.outputs if isinstance(call, Run) else (call.output,):
            numbers[name] = len(numbers)
    registers: list[Any] = [None] * len(numbers)
    fed = []
    left = _uses(recipe)
    arena = Arena()
    # In the order of a step, which is that of packed weights in memory.
    for name in dict.fromkeys(name for call in recipe.calls for name in call.inputs if name in recipe.sources):
        source = recipe.sources[name]
        if isinstance(source, Fed):
            fed.append((numbers[name], source.name))
        elif isinstance(source, Parameter):
            registers[numbers[name]] = _parameter(source, weights, left, arena)
        else:
            registers[numbers[name]] = recipe.constants[source.index]
    entries: list[Entry] = []
    alive = {numbers[recipe.output], *(numbers[name] for name in recipe.sources)}
    for call in reversed(recipe.calls):
        arguments = tuple(numbers[name] for name in call.inputs)
        dead = tuple(dict.fromkeys(argument for argument in arguments if argument not in alive))
        alive.update(dead)
        if isinstance(call, Run):
            results = tuple(numbers[name] for name in call.outputs)
            entries.append(Entry(call, functions[call.key], arguments, results, dead))
        else:
            entries.append(Entry(call, None, arguments, (numbers[call.output],), dead))
    return Program(entries[::-1], registers, fed, numbers[recipe.output])


def _uses(recipe: Recipe) -> dict[str, int]:
    """How many sources take each weight."""
    left: dict[str, int] = {}
    for source in recipe.sources.values():
        for name in source.names if isinstance(source, Parameter) else ():
            left[name] = left.get(name, 0) + 1
    return left


def _parameter(source: Parameter, weights: MutableMapping[str, Tensor], left: dict[str, int], arena: Arena) -> Tensor:
    parts = []
    for name in source.names:
        left[name] -= 1
        parts.append(weights[name] if left[name] else weights.pop(name))
    merged = parts[0] if len(parts) == 1 else torch.cat(parts)
    parts.clear()
    return pack(merged, arena) if source.packed else merged
