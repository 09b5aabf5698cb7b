"""What a model's folder says beside its weights: the ids that end an answer, the vocabulary, the context.

Needs no transformers, so that a warm start does without.
"""

from pathlib import Path
from typing import Any

from compiled.recipe import ModelFacts
from compiled.step import LoadError, ModelSpec
from compiled.weights import read_json, vocabulary_size


def spec_of(facts: ModelFacts, folder: Path, name: str, dtype: str, max_model_len: int | None) -> ModelSpec:
    """The model in ``folder``, of which ``facts`` are known, limited to ``max_model_len`` tokens.

    Raises:
        LoadError: the model's files contradict themselves, or the limit is above the model's own.
    """
    vocabulary = min(vocabulary_size(folder) or facts.vocab_size, facts.vocab_size)
    ends = _eos_token_ids(folder, facts.eos_token_ids)
    return ModelSpec(
        name=name,
        folder=str(folder),
        architecture=facts.architecture,
        dtype=dtype,
        vocab_size=vocabulary,
        max_model_len=context_limit(facts.context, max_model_len),
        eos_token_ids=tuple(token for token in ends if token < vocabulary),  # no other is ever drawn
    )


def context_limit(limit: int | None, asked: int | None) -> int:
    """Tokens of prompt and answer. Raises LoadError where the model's own ``limit`` is below what is asked for."""
    if asked is None:
        if limit is None:
            raise LoadError("the model names no context length; give max_model_len")
        return limit
    if limit is not None and asked > limit:
        raise LoadError(f"max_model_len {asked} is above the model's own limit of {limit} tokens")
    return asked


def _eos_token_ids(folder: Path, own: tuple[int, ...]) -> tuple[int, ...]:
    """The generation config's ids, else the model config's."""
    path = folder / "generation_config.json"
    generation = read_json(path)
    return token_ids(path, generation["eos_token_id"]) if "eos_token_id" in generation else own


def token_ids(path: Path, given: Any) -> tuple[int, ...]:
    """One id, a list of ids or None, as ``path`` gives them."""
    ids = given if isinstance(given, list | tuple) else () if given is None else (given,)
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise LoadError(f"{path}: eos_token_id must be an id or a list of ids, not {given!r}")
    return tuple(ids)
