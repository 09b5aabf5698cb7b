"""A model's folder → what runs its forward pass, in this order:

```
nothing saved: config → skeleton → trace → split → compile ┐
                              └ the checkpoint is read ────┴ bind → save
saved:         compiled pieces → the checkpoint is read ──── bind
```

What was saved needs neither transformers nor torch's compiler, and does not import them.
"""

import time
from collections.abc import Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from compiled.artifacts import Cache
from compiled.attention.base import AttentionSpec
from compiled.facts import spec_of
from compiled.parameters import read_directly
from compiled.program import LayerAttention, bind
from compiled.recipe import ModelFacts, Recipe, Run
from compiled.step import ModelSpec
from compiled.weights import Report, read_json

if TYPE_CHECKING:
    from compiled.pieces import Compiled


class Forward(Protocol):
    """A whole forward pass, compiled or not."""

    def __call__(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: LayerAttention) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Parts of the way to a compiled model that tests switch off. ``compose``: trace one layer of each kind only."""

    compose: bool = True


FAST = BuildOptions()


@dataclass(frozen=True)
class Built:
    """A forward pass, and what must be known of it. ``seconds`` tells the time of each stage, ``pieces`` how many calls
    of compiled pieces a pass makes and ``unique`` of how many different ones."""

    spec: ModelSpec
    layers: tuple[AttentionSpec, ...]
    run: Forward
    work: Mapping[str, float]
    seconds: Mapping[str, float]
    pieces: int = 0
    unique: int = 0


def build_eager(folder: Path, name: str, dtype: torch.dtype, max_model_len: int | None, report: Report) -> Built:
    """The uncompiled model: transformers' own code with its weights.

    Raises:
        LoadError: why this model cannot be served here.
    """
    from compiled.model import forward, load  # transformers is slow to import, and compiled models do without

    report("load", 0, 0)
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        model = load(folder, dtype, max_model_len)
    spec = _spec(model.facts, folder, name, dtype, max_model_len)

    def run(ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: LayerAttention) -> Tensor:
        return forward(model.module, ids_T, positions_T, rows_R, attention)

    return Built(spec, model.facts.layers, run, model.facts.work, seconds)


def build_compiled(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    max_model_len: int | None,
    report: Report,
    cache: Cache,
    options: BuildOptions,
) -> Built:
    """The compiled model, from ``cache`` where it has been compiled before.

    Raises:
        LoadError: why this model cannot be served here.
    """
    seconds: dict[str, float] = {}
    config = read_json(folder / "config.json")
    factors = cache.factors(config, dtype=str(dtype), max_model_len=max_model_len, **asdict(options))
    with _timed(seconds, "look"):
        found = cache.load(name, factors)
    if found is not None:
        recipe, functions, fresh = found.recipe, found.pieces, None
        weights = _load(folder, dtype, recipe, report, seconds)
    else:
        recipe, fresh, weights = _compile(folder, dtype, max_model_len, options, cache, report, seconds)
        functions = fresh.functions
    with _timed(seconds, "bind"):
        program = bind(recipe, functions, weights)
    if fresh is not None and not fresh.homebound:
        with _timed(seconds, "save"):
            cache.save(name, factors, recipe, fresh.generated)
    runs = sum(isinstance(call, Run) for call in recipe.calls)
    spec = _spec(recipe.model, folder, name, dtype, max_model_len)
    return Built(spec, recipe.model.layers, program, recipe.model.work, seconds, runs, len(functions))


def _compile(
    folder: Path,
    dtype: torch.dtype,
    max_model_len: int | None,
    options: BuildOptions,
    cache: Cache,
    report: Report,
    seconds: dict[str, float],
) -> "tuple[Recipe, Compiled, MutableMapping[str, Tensor]]":
    """The checkpoint is read while the code is traced and compiled."""
    # transformers and torch's compiler are slow to import, and what was saved does without them.
    from compiled import cold

    report("trace", 0, 0)
    with _timed(seconds, "describe"):
        described = cold.describe(folder, dtype, max_model_len, compose=options.compose)
    with ThreadPoolExecutor(1, "streamengine-read") as reader:
        reading = reader.submit(read_directly, folder, described.held) if described.facts.verbatim else None
        recipe, compiled = cold.compile_model(described, cache, report, seconds)
        with _timed(seconds, "load"):
            weights = None if reading is None else reading.result()
            # Not beside the compiler: transformers changes torch's default type for a while.
            weights = weights or cold.read_through_transformers(folder, dtype, recipe.held)
    return recipe, compiled, weights


def _load(
    folder: Path, dtype: torch.dtype, recipe: Recipe, report: Report, seconds: dict[str, float]
) -> MutableMapping[str, Tensor]:
    report("load", 0, 0)
    with _timed(seconds, "load"):
        weights = read_directly(folder, recipe.held) if recipe.model.verbatim else None
        if weights is None:
            from compiled import cold  # as above

            weights = cold.read_through_transformers(folder, dtype, recipe.held)
    return weights


def _spec(facts: ModelFacts, folder: Path, name: str, dtype: torch.dtype, max_model_len: int | None) -> ModelSpec:
    return spec_of(facts, folder, name, str(dtype).removeprefix("torch."), max_model_len)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started
