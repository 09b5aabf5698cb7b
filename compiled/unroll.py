"""A model is traced with one layer of each kind, and the pieces of those stand for those of all the others.

What is of one kind is not asked of the model's code: `compiled.outline` says what every stretch between two
attention calls does. A few layers are chosen that have every stretch of the model in their sequence, the
model is cut down to them, and the outline of *that* must show the very same stretches, fed from the same
places. Then Dynamo traces the short model, and each call of the real one is the call that stands for it
with the names of its own parameters. Where no such choice exists, the whole model is traced.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from compiled.outline import Stretch, outline
from compiled.recipe import Attention, Constant, Parameter, Source
from compiled.skeleton import give_memory
from compiled.split import Piece, Split, split
from compiled.stopwatch import Stopwatch
from compiled.trace import trace


class _Unlike(Exception):
    """The traced pieces do not fit together as the outline says."""


@dataclass(frozen=True)
class Choice:
    """``layers`` are traced; stretch ``stands_for[i]`` of theirs does what stretch i of the whole model does, with
    ``held[i]``: the traced stretch's names of parameters → its own."""

    layers: tuple[int, ...]
    stands_for: tuple[int, ...]
    held: tuple[Mapping[str, str], ...]


def choose(module: nn.Module) -> Choice | None:
    """The layers to trace of ``module``, which is all on the meta device; None: the whole model."""
    try:
        whole = outline(module)
    except Exception:  # code that looks at numbers; tracing it says what is wrong
        return None
    if _layer_list(module, len(whole) - 1) is None:
        return None
    for layers in _candidates(_states(whole)):
        try:
            with _only(module, layers):
                short = outline(module)
        except Exception:
            continue
        if choice := _match(whole, short, layers):
            return choice
    return None


def split_model(module: nn.Module, choice: Choice | None, buffers: Mapping[str, Tensor], timed: Stopwatch) -> Split:
    """The forward pass of ``module`` in pieces. Its parameters are given (untouched) memory as far as they are traced;
    ``buffers`` are those that no checkpoint holds, by name."""
    if choice is not None:
        with timed("trace"), _only(module, choice.layers):
            give_memory(module)
            short = trace(module)
        try:
            with timed("split"):
                return _with_constants(_unroll(split(short.graph, short.given), choice), buffers)
        except _Unlike:
            pass
    with timed("trace"):
        give_memory(module)
        whole = trace(module)
    with timed("split"):
        return _with_constants(split(whole.graph, whole.given), buffers)


def _states(stretches: Sequence[Stretch]) -> list[Any]:
    """For each stretch what must be equal for one to stand for another: what it does, where its values come from, and
    what the stretch before does, whose results it takes by their number."""
    states: list[Any] = []
    for before, stretch in zip([None, *stretches], stretches, strict=False):
        known = before is None or (stretch.certain and not any(origin[0] == "far" for origin in stretch.origins))
        same = (before and before.key, stretch.key, stretch.origins)
        states.append(same if known else object())
    return states


def _candidates(states: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Layers to try: as few as have all states in their sequence; then the first ones of the model, as many as have
    all; each with the last layer's state at the end."""
    layers = list(range(len(states) - 1))
    # Layer i lies between states i and i + 1. What lies between two equal states may be left out.
    while cut := _removable([states[layer] for layer in layers]):
        del layers[cut]
    if len(layers) < len(states) - 1:
        yield tuple(layers)
    for count in range(3, len(states) - 1):
        if states[count - 1] == states[-2] and set(states[1:-1]) == set(states[1:count]):
            yield tuple(range(count))


def _removable(states: Sequence[Any]) -> slice | None:
    """The longest run of layers that begins at a state (not the first layer's) which comes again behind it, and whose
    states all occur elsewhere."""
    for length in range(len(states) - 2, 0, -1):
        for begin in range(1, len(states) - length):
            rest = {*states[:begin], *states[begin + length :]}
            if states[begin] == states[begin + length] and rest.issuperset(states[begin : begin + length]):
                return slice(begin, begin + length)
    return None


def _match(whole: Sequence[Stretch], short: Sequence[Stretch], layers: tuple[int, ...]) -> Choice | None:
    if len(short) != len(layers) + 1:
        return None
    wanted, there = _states(whole), _states(short)
    if (wanted[0], wanted[-1]) != (there[0], there[-1]):
        return None
    number = {state: i for i, state in reversed(list(enumerate(there[:-1])))} | {there[-1]: len(short) - 1}
    if not number.keys() >= set(wanted):
        return None
    stands_for = tuple(number[state] for state in wanted)
    held = tuple(
        dict(zip(short[i].held, stretch.held, strict=True)) for i, stretch in zip(stands_for, whole, strict=True)
    )
    return Choice(layers, stands_for, held)


def _layer_list(module: nn.Module, count: int) -> tuple[nn.Module, str] | None:
    """The one list of ``count`` modules that lies in no other list: its owner and name there."""
    lists = {path: child for path, child in module.named_modules() if isinstance(child, nn.ModuleList)}
    found = [
        path
        for path, child in lists.items()
        if len(child) == count and not any(path.startswith(f"{other}.") for other in lists)
    ]
    if len(found) != 1:
        return None
    owner, _, name = found[0].rpartition(".")
    return module.get_submodule(owner), name


@contextmanager
def _only(module: nn.Module, layers: Sequence[int]) -> Iterator[None]:
    """``module`` with these ``layers`` alone, in its list of layers and in every list of its configs that says
    something for each layer."""
    configs = {id(child.config): child.config for child in module.modules() if hasattr(child, "config")}
    before = [(config, dict(vars(config))) for config in configs.values()]
    count = next(config.num_hidden_layers for config in configs.values())
    place = _layer_list(module, count)
    assert place is not None
    owner, name = place
    everything = owner._modules[name]
    assert isinstance(everything, nn.ModuleList)
    try:
        owner._modules[name] = nn.ModuleList(everything[layer] for layer in layers)
        for config, fields in before:
            for field, value in fields.items():
                if isinstance(value, list | tuple) and len(value) == count:
                    vars(config)[field] = type(value)(value[layer] for layer in layers)
            config.num_hidden_layers = len(layers)
        yield
    finally:
        owner._modules[name] = everything
        for config, fields in before:
            vars(config).clear()
            vars(config).update(fields)


def _unroll(short: Split, choice: Choice) -> Split:
    """The calls of the whole model, from those of the traced layers."""
    pieces = [call for call in short.calls[::2] if isinstance(call, Piece)]
    attentions = [call for call in short.calls[1::2] if isinstance(call, Attention)]
    if (len(pieces), len(attentions)) != (len(choice.layers) + 1, len(choice.layers)):
        raise _Unlike
    values = _Values(short, pieces, attentions, choice)
    calls: list[Piece | Attention] = []
    for number, traced in enumerate(choice.stands_for):
        piece = pieces[traced]
        calls.append(
            replace(
                piece,
                name=_renumbered(piece.name, traced, number),
                inputs=tuple(values.taken(name, number) for name in piece.inputs),
                outputs=tuple(f"{name}.{number}" for name in piece.outputs),
            )
        )
        if number < len(choice.stands_for) - 1:
            attention = attentions[traced]
            query, key, value, *sinks = (values.taken(name, number) for name in attention.inputs)
            calls.append(Attention(number, query, key, value, f"{attention.output}.{number}", *sinks))
    return Split(tuple(calls), values.sources, values.taken(short.output, len(choice.stands_for) - 1))


class _Values:
    """How the values of the traced calls are called where these stand for others."""

    def __init__(self, short: Split, pieces: Sequence[Piece], attentions: Sequence[Attention], choice: Choice) -> None:
        self.sources: dict[str, Source] = {}
        self._short, self._pieces, self._attentions, self._choice = short, pieces, attentions, choice

    def taken(self, name: str, number: int) -> str:
        """``name``, which the traced stretch that stands for stretch ``number`` takes, as that one calls it."""
        if (source := self._short.sources.get(name)) is not None:
            return self._given(name, source, number)
        traced = self._choice.stands_for[number]
        if name in self._pieces[traced].outputs:
            return f"{name}.{number}"
        if name in self._pieces[0].outputs:
            return f"{name}.0"
        before = self._choice.stands_for[number - 1]
        if name == self._attentions[traced - 1].output:
            return f"{self._attentions[before].output}.{number - 1}"
        maker, there = self._pieces[traced - 1], self._pieces[before]
        if name not in maker.outputs or maker.key != there.key:
            raise _Unlike
        return f"{there.outputs[maker.outputs.index(name)]}.{number - 1}"

    def _given(self, name: str, source: Source, number: int) -> str:
        if isinstance(source, Parameter):
            if name not in self._choice.held[number]:
                raise _Unlike
            name = self._choice.held[number][name]
            source = Parameter((name,))
        self.sources[name] = source
        return name


def _renumbered(name: str, traced: int, number: int) -> str:
    """A piece's ``name`` with the layers before and behind its attention calls as the model counts them."""

    def layer(match: re.Match[str]) -> str:
        there = int(match[1])
        return f".{there + number - traced}:" if there in (traced - 1, traced) else match[0]

    return re.sub(r"\.(\d+):", layer, name)


def _with_constants(parts: Split, buffers: Mapping[str, Tensor]) -> Split:
    """Buffers that no checkpoint holds become constants."""
    used = [name for name in parts.sources if name in buffers]
    constants = {name: Constant(i) for i, name in enumerate(used)}
    return replace(parts, sources={**parts.sources, **constants}, constants=tuple(buffers[name] for name in used))
