"""A model's folder → what runs its forward pass, in this order:

```
nothing saved: config → skeleton → trace → split → compile ┐
                              └ the checkpoint is read ────┴ run uncompiled → bind → (compare → save)
saved:         compiled pieces → the checkpoint is read ────────────────────── bind
```

What was saved needs neither transformers nor torch's compiler, and does not import them.
"""

import logging
from collections.abc import Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compiled import bars
from compiled.artifacts import Cache, Factors
from compiled.attention.base import AttentionSpec
from compiled.facts import spec_of
from compiled.inductor import Generated
from compiled.linear import op as linear
from compiled.native import KernelUnavailable
from compiled.parameters import read_directly
from compiled.program import Forward, PlannedAttention, bind
from compiled.recipe import ModelFacts, Recipe, Run
from compiled.selfcheck import Check, Expected, expect
from compiled.step import LoadError, ModelSpec
from compiled.stopwatch import Stopwatch
from compiled.timeline import PieceAbout
from compiled.weights import Report, cache_folder, read_json

if TYPE_CHECKING:
    from compiled.pieces import Compiled

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Parts of the way to a compiled model that tests switch off. ``compose``: trace one layer of each kind only;
    ``fuse``: linears are merged and read packed weights."""

    compose: bool = True
    fuse: bool = True


FAST = BuildOptions()


@dataclass(frozen=True)
class Fresh:
    """What no check has passed yet. ``expected`` is what the uncompiled model says (None: it cannot be asked);
    `keep` saves the rest, unless a piece of it runs in this process only (``generated`` is None)."""

    factors: Factors
    recipe: Recipe
    generated: Mapping[str, Generated] | None
    expected: Expected | None


@dataclass(frozen=True)
class Built:
    """A forward pass, and what must be known of it. ``seconds`` tells the time of each stage, ``pieces`` how many calls
    of compiled pieces a pass makes and ``unique`` of how many different ones; ``fresh`` is None for what was saved.
    ``about`` says of each piece what is in it and how it was made."""

    spec: ModelSpec
    layers: tuple[AttentionSpec, ...]
    run: Forward
    work: Mapping[str, float]
    seconds: Mapping[str, float]
    pieces: int = 0
    unique: int = 0
    fresh: Fresh | None = None
    about: tuple[PieceAbout, ...] = ()


class _InOrder:
    """A planned attention for an uncompiled forward pass, whose layers come in order and without a number."""

    def __init__(self, attention: PlannedAttention) -> None:
        self.attend = attention.attend
        self._next = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        self._next += 1
        return self.attend(query, key, value, self._next - 1, sinks)


def build_eager(
    folder: Path, name: str, dtype: torch.dtype, max_model_len: int | None, report: Report, where: torch.device
) -> Built:
    """The uncompiled model: transformers' own code with its weights, ``where`` it is to run.

    Raises:
        LoadError: why this model cannot be served here.
    """
    from compiled.model import forward, load  # transformers is slow to import, and compiled models do without

    report("load", 0, 0)
    timed = Stopwatch()
    with timed("load"):
        model = load(folder, dtype, max_model_len)
        model.module.to(where)
    spec = _spec(model.facts, folder, name, dtype, max_model_len)

    def run(ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: PlannedAttention) -> Tensor:
        return forward(model.module, ids_T, positions_T, rows_R, _InOrder(attention))

    return Built(spec, model.facts.layers, run, model.facts.work, timed.seconds)


def build_compiled(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    max_model_len: int | None,
    report: Report,
    cache: Cache,
    options: BuildOptions,
    where: torch.device,
) -> Built:
    """The compiled model, from ``cache`` where it has been compiled before, with its weights ``where`` it is to run.

    Raises:
        LoadError: why this model cannot be served here.
    """
    timed = Stopwatch()
    factors = factors_of(folder, dtype, max_model_len, cache, options)
    with timed("look"):
        found = cache.load(name, factors)
    generated: Mapping[str, Generated] | None = {}
    if found is not None:
        _load_kernels(where)
        recipe, functions, module = found.recipe, found.pieces, None
        weights = _load(folder, dtype, recipe, report, timed)
        about = _about(recipe, found.generated, found.generated.keys(), None)
    else:
        missed = cache.explain(name, factors)
        recipe, compiled, weights, module = _compile(folder, dtype, max_model_len, options, cache, report, timed, where)
        functions, generated = compiled.functions, None if compiled.homebound else compiled.generated
        about = _about(recipe, {**compiled.found, **compiled.generated}, compiled.found.keys(), missed)
    spec = _spec(recipe.model, folder, name, dtype, max_model_len)
    fresh = None
    if found is None or found.notes.get("check") is None:
        with timed("expect"):
            expected = _expect(module, folder, dtype, max_model_len, weights, spec)
        fresh = Fresh(factors, recipe, generated, expected)
    with timed("bind"):
        program = bind(_move(recipe, weights, where), functions, weights)
    runs = sum(isinstance(call, Run) for call in recipe.calls)
    model = recipe.model
    return Built(spec, model.layers, program, model.work, timed.seconds, runs, len(functions), fresh, about)


def _about(
    recipe: Recipe, generated: Mapping[str, Generated], found: Collection[str], missed: str | None
) -> tuple[PieceAbout, ...]:
    places: dict[str, list[str]] = {}
    for call in recipe.calls:
        if isinstance(call, Run):
            places.setdefault(call.key, []).append(call.name)
    about = []
    for key, names in places.items():
        facts, made = recipe.facts.get(key), generated.get(key)
        told = PieceAbout(key, tuple(names), found=key in found, missed=None if key in found else missed)
        if facts is not None:
            told = replace(told, work=facts.work, graph=facts.graph)
        if made is not None:
            told = replace(told, code=made.source, kernels=made.kernels, seconds=made.seconds)
        about.append(told)
    return tuple(about)


def _move(recipe: Recipe, weights: MutableMapping[str, Tensor], where: torch.device) -> Recipe:
    """Put ``weights`` where they are to be used, one at a time; the recipe with its constants there."""
    for name in weights if where.type != "cpu" else ():
        weights[name] = weights[name].to(where)
    return replace(recipe, constants=tuple(constant.to(where) for constant in recipe.constants))


def factors_of(
    folder: Path, dtype: torch.dtype, max_model_len: int | None, cache: Cache, options: BuildOptions
) -> Factors:
    """All that decides what is compiled for the model in ``folder``."""
    config = read_json(folder / "config.json")
    return cache.factors(config, dtype=str(dtype), max_model_len=max_model_len, **asdict(options))


def compile_only(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    max_model_len: int | None,
    where: torch.device,
    report: Report,
    cache: Cache,
) -> bool:
    """Fill ``cache`` from the model's config, without any of its weights; False where there was nothing to do. What
    is saved is checked by the first start that has weights.

    Raises:
        LoadError: why this model cannot be served here.
    """
    factors = factors_of(folder, dtype, max_model_len, cache, FAST)
    if cache.load(name, factors) is not None:
        return False
    from compiled import cold, pieces  # as below

    pieces.check_compiler(where)
    _load_kernels(where)
    described = cold.describe(folder, dtype, max_model_len)
    recipe, compiled = cold.compile_model(described, cache, report, Stopwatch(), fused=FAST.fuse, where=where)
    keep(cache, name, Fresh(factors, recipe, None if compiled.homebound else compiled.generated, None), None)
    return True


def keep(cache: Cache, model: str, fresh: Fresh, check: Check | None) -> None:
    """Save what was compiled, with the ``check`` that it has passed."""
    if fresh.generated is not None:
        told = None if check is None else asdict(check)
        cache.save(model, fresh.factors, fresh.recipe, fresh.generated, check=told)


def _expect(
    module: nn.Module | None,
    folder: Path,
    dtype: torch.dtype,
    max_model_len: int | None,
    weights: Mapping[str, Tensor],
    spec: ModelSpec,
) -> Expected | None:
    try:
        if module is None:
            from compiled import cold  # as below: compiled without weights, so this is its first start

            module = cold.plain(folder, dtype, max_model_len)
        return expect(module, weights, spec.vocab_size)
    except Exception as error:  # transformers raises whatever it trips over; what is compiled may still be right
        log.warning("the compiled model is not checked: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        return None


def _compile(
    folder: Path,
    dtype: torch.dtype,
    max_model_len: int | None,
    options: BuildOptions,
    cache: Cache,
    report: Report,
    timed: Stopwatch,
    where: torch.device,
) -> "tuple[Recipe, Compiled, MutableMapping[str, Tensor], nn.Module]":
    """The checkpoint is read while the code is traced and compiled."""
    with ThreadPoolExecutor(2, "streamengine-read") as reader:
        kernel = reader.submit(_load_kernels, where)
        with timed("compiler"):
            # transformers and torch's compiler are slow to import, and what was saved does without them.
            from compiled import cold, pieces
        pieces.check_compiler(where)
        report("trace", 0, 0)
        with timed("describe"):
            described = cold.describe(folder, dtype, max_model_len, compose=options.compose)
        reading = reader.submit(read_directly, folder, described.held) if described.facts.verbatim else None
        recipe, compiled = cold.compile_model(described, cache, report, timed, fused=options.fuse, where=where)
        with timed("load"):
            kernel.result()
            weights = None if reading is None else reading.result()
            # Not beside the compiler: transformers changes torch's default type for a while.
            weights = weights or cold.read_through_transformers(folder, dtype, recipe.held)
    return recipe, compiled, weights, described.module


def _load(
    folder: Path, dtype: torch.dtype, recipe: Recipe, report: Report, timed: Stopwatch
) -> MutableMapping[str, Tensor]:
    report("load", 0, 0)
    with timed("load"):
        weights = read_directly(folder, recipe.held) if recipe.model.verbatim else None
        if weights is None:
            from compiled import cold  # as above

            weights = cold.read_through_transformers(folder, dtype, recipe.held)
    return weights


def _load_kernels(where: torch.device) -> None:
    """Those of the CPU; a GPU has its own."""
    if where.type != "cpu":
        return
    try:
        linear.load_kernel(cache_folder() / "kernels")
        bars.load_kernel(cache_folder() / "kernels")
    except KernelUnavailable as error:
        raise LoadError(f"compiled models need the kernels of the CPU: {error}; use --eager") from error


def _spec(facts: ModelFacts, folder: Path, name: str, dtype: torch.dtype, max_model_len: int | None) -> ModelSpec:
    return spec_of(facts, folder, name, str(dtype).removeprefix("torch."), max_model_len)
