"""A piece's graph → the work that one call of it has, symbolic in the numbers of tokens and logit rows.

The graph is run on its fake inputs, and every operator that torch dispatches is looked at: nothing depends on how
a model writes its layers. What is counted and what is not says `compiled.work`. Sizes that are no polynomial of T
and R (of a graph that depends on numbers) make a piece's work unknown.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled.recipe import Fed, PieceFacts
from compiled.split import Piece, Split
from compiled.work import Polynomial, Work, constant

log = logging.getLogger(__name__)

_LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Take rows out of their first tensor, and read no more of it than they give."""

_MOVES = {
    *_LOOKUPS, "clone", "_to_copy", "copy", "copy_", "contiguous", "cat", "stack", "where", "masked_fill",
    "masked_fill_", "fill", "fill_", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "empty",
    "empty_like", "empty_strided", "new_empty", "new_zeros", "new_ones", "new_full", "arange", "scalar_tensor",
    "lift_fresh_copy", "_unsafe_view", "repeat", "constant_pad_nd", "scatter", "scatter_", "index_put", "index_put_",
    "_index_put_impl_", "slice_scatter", "select_scatter", "topk", "sort", "flip", "roll", "tril", "triu", "split_copy",
    "split_with_sizes_copy", "index_copy", "index_fill", "masked_select", "view_copy", "expand_copy", "unfold_copy",
    "histc", "bincount", "one_hot",
}  # fmt: skip
"""Give floating point numbers and compute none."""

_ROUTED = {"_grouped_mm", "grouped_mm_fallback"}
"""Read those experts of their weight that some token is sent to: how many bytes that is, no shape says."""


class _Unknown(Exception):
    """A size that is no polynomial of T and R."""


def describe_pieces(parts: Split) -> dict[str, PieceFacts]:
    """Each unique piece by its key."""
    sizes = _sizes(parts)
    return {piece.key: PieceFacts(_text(piece.graph), _work(piece, sizes)) for piece in parts.unique}


def _text(graph: fx.GraphModule) -> str:
    """As Python that one can read, with the lines of the model's code; their folders are this machine's and no use."""
    folders = rf"# File: (\S*/site-packages|{re.escape(str(Path(__file__).parent.parent))})/"
    return re.sub(folders, "# File: ", graph.print_readable(print_output=False))


def _work(piece: Piece, sizes: Mapping[str, str]) -> Work | None:
    try:
        return count(piece.graph, sizes)
    except Exception as error:  # whatever its operators raise: a model is not refused for what only informs
        log.info("the work of %s is not counted: %s: %s", piece.name, type(error).__name__, error)
        return None


def count(graph: fx.GraphModule, sizes: Mapping[str, str]) -> Work:
    """The work of ``graph``, whose placeholders have fake values; ``sizes`` says which symbol is T and which R."""
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in inputs if isinstance(value, Tensor))
    counter = _Counter(inputs, sizes)
    # The graph has been traced with these values: what is asked of their sizes again is no news.
    with torch.no_grad(), mode.shape_env.suppress_guards(), mode, counter:
        results = fx.Interpreter(graph).run(*inputs)
    moved = None if counter.routed else sum((*counter.read(), *counter.written(results)), Polynomial())
    return Work(moved, counter.flops, tuple(sorted(counter.uncounted)))


class _Counter(TorchDispatchMode):
    """Sees every operator, and adds up."""

    def __init__(self, inputs: list[Any], sizes: Mapping[str, str]) -> None:
        super().__init__()
        self._sizes = sizes
        self._given = {_storage(value): value for value in inputs if isinstance(value, Tensor)}
        self._reads: dict[int, dict[object, Polynomial]] = defaultdict(dict)
        self._overwritten: dict[int, Polynomial] = {}
        self.flops = Polynomial()
        self.uncounted: set[str] = set()
        self.routed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if not func.is_view and made:
            operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            self._note_memory(func, operands, made[0])
            self._note_operations(func, args, operands, made)
        return result

    def read(self) -> Iterator[Polynomial]:
        """Bytes of each input: of the parts that were taken, and not more than all."""
        for storage, parts in self._reads.items():
            taken, everything = sum(parts.values(), Polynomial()), self._bytes(self._given[storage])
            yield taken if taken(64, 16) < everything(64, 16) else everything

    def written(self, results: Any) -> Iterator[Polynomial]:
        """Bytes of each result that is no view of an input, and of inputs that were changed."""
        made = [value for value in tree_leaves(results) if isinstance(value, Tensor)]
        places = {_place(value): value for value in made if _storage(value) not in self._given}
        yield from map(self._bytes, places.values())
        yield from self._overwritten.values()

    def _note_memory(self, func: Any, operands: list[Tensor], made: Tensor) -> None:
        for number, operand in enumerate(operands):
            storage = _storage(operand)
            if storage not in self._given:
                continue
            if number == 0 and func._schema.is_mutable:
                self._overwritten[storage] = self._bytes(operand)
            elif number == 0 and _name(func) in _LOOKUPS:
                self._reads[storage][len(self._reads[storage])] = self._bytes(made)
            else:
                self._reads[storage][_place(operand)] = self._bytes(operand)

    def _note_operations(self, func: Any, args: Any, operands: list[Tensor], made: list[Tensor]) -> None:
        name = _name(func)
        self.routed |= name in _ROUTED
        if name in _MOVES or not (made[0].is_floating_point() or made[0].is_complex()):
            return
        result = self._count(made[0])
        if name in ("mm", "bmm", "dot", "mv") or name in _ROUTED:
            self.flops += constant(2) * result * self._size(operands[0].shape[-1])
        elif name in ("addmm", "baddbmm", "addbmm"):
            self.flops += constant(2) * result * self._size(operands[1].shape[-1]) + result
        elif name == "linear":
            bias = result if len(operands) > 2 else Polynomial()
            self.flops += constant(2) * result * self._size(operands[0].shape[-1]) + bias
        elif name == "_softmax":  # maximum, difference, exponential, sum, quotient
            rows = self._count(made[0].select(args[1], 0))
            self.flops += constant(5) * result - constant(2) * rows
        elif name in ("native_layer_norm", "_fused_rms_norm"):
            # mean and difference (of the former), square, mean, epsilon, root, product; then weight and bias
            each = constant((5 if name == "native_layer_norm" else 3) + len(operands) - 1)
            self.flops += each * result + constant(2) * self._count(made[1])
        elif torch.Tag.pointwise in func.tags:
            self.flops += result
        elif torch.Tag.reduction in func.tags or name == "cumsum":
            summed = self._count(operands[0])
            self.flops += summed if name in ("mean", "cumsum") else summed - result
        else:
            self.uncounted.add(str(func))

    def _bytes(self, tensor: Tensor) -> Polynomial:
        return self._count(tensor) * constant(tensor.itemsize)

    def _count(self, tensor: Tensor) -> Polynomial:
        product = constant(1)
        for size in tensor.shape:
            product = product * self._size(size)
        return product

    def _size(self, size: int | torch.SymInt) -> Polynomial:
        if isinstance(size, int):
            return constant(size)
        expression = size.node.expr  # sympy's, which knows what a polynomial is
        symbols = sorted(expression.free_symbols, key=str)
        powers = [self._sizes.get(str(symbol)) for symbol in symbols]
        polynomial = expression.as_poly(*symbols) if symbols and None not in powers else None
        if polynomial is None or not all(coefficient.is_integer for coefficient in polynomial.coeffs()):
            raise _Unknown(f"{expression} is no polynomial of T and R")
        found = Polynomial()
        for exponents, coefficient in polynomial.terms():
            power = dict(zip(powers, exponents, strict=True))
            found += Polynomial(((int(coefficient), power.get("T", 0), power.get("R", 0)),))
        return found


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: Tensor) -> tuple[str, ...]:
    """Which part of its memory it is; symbols as text, because comparing them would bind them."""
    return (str(_storage(tensor)), str(tensor.storage_offset()), str(tuple(tensor.shape)), str(tensor.stride()))


def _sizes(parts: Split) -> dict[str, str]:
    """Which symbol is T and which R: pieces of one `Split` share the symbols of its trace."""
    dimensions = {"ids": "T", "positions": "T", "rows": "R"}
    found: dict[str, str] = {}
    for piece in parts.pieces:
        placeholders = (node for node in piece.graph.graph.nodes if node.op == "placeholder")
        for name, node in zip(piece.inputs, placeholders, strict=True):
            source, value = parts.sources.get(name), node.meta["example_value"]
            if isinstance(source, Fed):
                size = value.shape[0] if isinstance(value, Tensor) else value
                found[str(size)] = dimensions.get(source.name, source.name)
    return found
