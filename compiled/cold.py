"""What has to be done where a model was never compiled: its code is read, traced, cut, and compiled.

Everything here needs transformers and torch's compiler, which take seconds to import; `compiled.build` comes here
only when there is nothing to load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from compiled.artifacts import Cache
from compiled.counting import describe_pieces
from compiled.fuse import fuse
from compiled.model import facts_of, limit_of, read_config, read_weights
from compiled.move import move
from compiled.pieces import Compiled, compile_pieces
from compiled.probe import probe
from compiled.recipe import Held, ModelFacts, Parameter, PieceFacts, Recipe, Run
from compiled.rope import settle_rope
from compiled.skeleton import build_skeleton, compute_buffers, held_tensors
from compiled.split import Piece, Split
from compiled.step import LoadError
from compiled.stopwatch import Stopwatch
from compiled.unroll import Choice, choose, split_model


@dataclass(frozen=True)
class Description:
    """A model before any of its weights is read. ``held`` are the tensors that its checkpoint must have, ``buffers``
    those that it has not, ``choice`` the layers to trace (None: all)."""

    module: PreTrainedModel
    facts: ModelFacts
    held: Mapping[str, Held]
    buffers: Mapping[str, Tensor]
    choice: Choice | None


def describe(folder: Path, dtype: torch.dtype, max_model_len: int | None, *, compose: bool = True) -> Description:
    """Learn what the model in ``folder`` is made of and asks for.

    Raises:
        LoadError: a kind that is not supported, by name.
    """
    module = _skeleton(folder, dtype, max_model_len)
    choice = choose(module) if compose else None
    buffers = compute_buffers(module)
    facts = facts_of(folder, module, module.config, probe(module, limit_of(module.config, max_model_len)))
    return Description(module, facts, held_tensors(module, buffers), buffers, choice)


def plain(folder: Path, dtype: torch.dtype, max_model_len: int | None) -> PreTrainedModel:
    """transformers' own model without its weights, for `compiled.selfcheck`."""
    module = _skeleton(folder, dtype, max_model_len)
    compute_buffers(module)
    return module


def _skeleton(folder: Path, dtype: torch.dtype, max_model_len: int | None) -> PreTrainedModel:
    config = read_config(folder)
    settle_rope(config.get_text_config(decoder=True), limit_of(config, max_model_len))
    return build_skeleton(config, dtype)


def compile_model(
    described: Description,
    cache: Cache,
    report: Callable[[str, float, float], None],
    timed: Stopwatch,
    *,
    fused: bool,
    where: torch.device,
) -> tuple[Recipe, Compiled]:
    """Trace, split, fuse and compile for ``where``, whatever the depth, one layer of each kind."""
    report("trace", 0, 0)
    parts = split_model(described.module, described.choice, described.buffers, timed)
    with timed("split"):
        parts = fuse(parts, packing=where.type == "cpu") if fused else parts
        parts = parts if where.type == "cpu" else move(parts, where)
    with timed("count"):
        facts = describe_pieces(parts)
    with timed("compile"):
        compiled = compile_pieces(parts, cache, report)
    return _recipe(parts, described, facts), compiled


def read_through_transformers(folder: Path, dtype: torch.dtype, held: Mapping[str, Held]) -> dict[str, Tensor]:
    """The tensors of ``held`` from a model that transformers has loaded.

    Raises:
        LoadError: they cannot be read, or are not what the config says.
    """
    module = read_weights(folder, dtype)
    tensors = module.state_dict(keep_vars=True)
    for name, expected in held.items():
        for alias in expected.aliases:
            if tensors[alias] is not tensors[name]:
                raise LoadError(f"{folder} is broken: its config says that {name} and {alias} are one, and they differ")
        found = (tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch."))
        if found != (expected.shape, expected.dtype):
            raise LoadError(f"{folder}: {name} is {found}, not {(expected.shape, expected.dtype)} as its config says")
    return {name: tensors[name].detach() for name in held}


def _recipe(parts: Split, described: Description, facts: Mapping[str, PieceFacts]) -> Recipe:
    names = {name for one in parts.sources.values() if isinstance(one, Parameter) for name in one.names}
    return Recipe(
        calls=tuple(
            Run(call.name, call.key, call.inputs, call.outputs) if isinstance(call, Piece) else call
            for call in parts.calls
        ),
        sources=parts.sources,
        constants=parts.constants,
        held={name: described.held[name] for name in sorted(names)},
        output=parts.output,
        model=described.facts,
        facts=facts,
    )
