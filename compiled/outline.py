"""What each stretch of a model between two attention calls does, learnt from one run on the meta device.

Nothing is computed there and nothing is traced: every operation is written down as text, with its operands
numbered by first appearance, its numbers as they are, and parameters without their names. So stretches with
equal keys do the same with parameters of their own, whatever their layers are called and whatever the code
looked at to choose its way; a layer that computes with its own index differs from the others.
It costs a few milliseconds a layer, a hundredth of what a trace costs.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export._trace import _compiling_state_context
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from compiled.attention import operator
from compiled.model import forward
from compiled.skeleton import named_tensors

TOKENS, ROWS = 5, 3
"""Sizes of the run: unlike each other, and unlike 1, which broadcasts."""

Origin = tuple[str, int, int]
"""Where a value comes from, as seen from a stretch: ``("own" | "before" | "first" | "far", stretch, operation)`` with
the distance and number where they matter, ``("attention", …)``, ``("held" | "fed" | "unknown", …)``."""


@dataclass(frozen=True)
class Stretch:
    """The operations between two attention calls.

    ``held`` names the parameters and buffers that it reads, in order of first use. ``origins`` says of every
    other value that it takes, and of the operands of the attention behind it, where it comes from. ``certain`` is
    False where a number went into it that this run cannot see.
    """

    key: str
    held: tuple[str, ...]
    origins: tuple[Origin, ...]
    certain: bool


def outline(module: nn.Module) -> list[Stretch]:
    """The stretches of ``module``, whose tensors are all on the meta device: one more than attention calls."""
    names = dict(named_tensors(module))
    fed = [torch.zeros(TOKENS, dtype=torch.long, device="meta") for _ in range(2)]
    fed.append(torch.zeros(ROWS, dtype=torch.long, device="meta"))
    recorder = _Recorder({id(tensor): name for name, tensor in names.items()}, fed)
    with torch.no_grad(), recorder, _compiling_state_context():
        forward(module, fed[0], fed[1], fed[2], None)
    return recorder.finish()


class _Recorder(TorchDispatchMode):
    def __init__(self, held: dict[int, str], fed: list[Tensor]) -> None:
        super().__init__()
        self._held = held
        self._made: dict[int, Origin] = {id(tensor): ("fed", i, 0) for i, tensor in enumerate(fed)}
        self._alive: list[Tensor] = list(fed)  # an id is a tensor's as long as it lives
        self._stretches: list[Stretch] = []
        self._begin()

    def _begin(self) -> None:
        self._digest = hashlib.sha256()
        self._names: dict[str, int] = {}
        self._values: dict[Origin, int] = {}
        self._operations = 0
        self._certain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in operator.TARGETS:
            self._write(("attention", args))
            self._end()
            self._remember(result, "attention")
        else:
            self._write((str(func), args, kwargs))
            self._remember(result, "made")
        return result

    def finish(self) -> list[Stretch]:
        self._end()
        return self._stretches

    def _end(self) -> None:
        self._stretches.append(
            Stretch(self._digest.hexdigest(), tuple(self._names), tuple(self._values), self._certain)
        )
        self._begin()

    def _remember(self, result: Any, kind: str) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = (kind, len(self._stretches), self._operations)
                self._alive.append(tensor)
                self._operations += 1

    def _write(self, operation: Any) -> None:
        self._digest.update(repr(tree_map(self._describe, operation)).encode())

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        meta = (str(value.dtype), tuple(value.shape), value.stride())
        if (name := self._held.get(id(value))) is not None and id(value) not in self._made:
            return "held", self._names.setdefault(name, len(self._names)), meta
        origin = self._seen_from_here(self._made.get(id(value)))
        if origin[0] == "own":
            return origin
        if origin[0] == "unknown":
            self._certain = False
        return "outside", self._values.setdefault(origin, len(self._values)), meta

    def _seen_from_here(self, origin: Origin | None) -> Origin:
        """Stretches of one kind take their values from equal places, relative to themselves."""
        if origin is None:
            return ("unknown", 0, 0)
        kind, stretch, number = origin
        here = len(self._stretches)
        if kind == "fed":
            return origin
        if kind == "attention":
            return ("attention", here - stretch, 0)
        if stretch == here:
            return ("own", 0, number)
        if stretch == here - 1:
            return ("before", 0, number)
        return ("first", 0, number) if stretch == 0 else ("far", here - stretch, number)
