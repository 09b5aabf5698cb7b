"""transformers' own modelling code, with its attention replaced by ours.

The decoder runs on flattened tokens ``[1, T]`` with explicit positions, without a cache and without a
mask: who attends to what is the business of the paged attention backend. Everything a model asks of
its attention is learnt by running it once (`probe`), never from a list of names; what the backend
does not have is refused at load.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from compiled.attention import operator
from compiled.attention.base import AttentionSpec
from compiled.facts import context_limit, token_ids
from compiled.kv_scales import quantizes_cache_only
from compiled.probe import probe
from compiled.recipe import ModelFacts
from compiled.rope import settle_rope
from compiled.step import LoadError
from compiled.weights import read_json

ATTENTION = "streamengine_paged"


class PagedAttention(Protocol):
    """What stands in for the attention of every layer in an uncompiled run; called in layer order."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """``q_THD, k_TKD, v_TKE, scale, sinks_H`` → ``out_THE``."""
        ...


_paged: ContextVar[PagedAttention | None] = ContextVar("paged", default=None)
"""The attention of the uncompiled run in progress. Not every model hands a keyword argument down to its layers."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: ``query [1, H, T, D]`` → ``[1, T, H, E]``. ``s_aux`` are sinks [H]."""
    q_THD, k_TKD, v_TKE = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    if (paged := None if torch.compiler.is_compiling() else _paged.get()) is None:
        out_THE = operator.attention(q_THD, k_TKD, v_TKE, *(() if s_aux is None else (s_aux,)))
    else:
        scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
        out_THE = paged(q_THD, k_TKD, v_TKE, scale, s_aux)
    return out_THE.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True)
class LoadedModel:
    """Weights in memory, and what is known of them."""

    module: PreTrainedModel
    facts: ModelFacts


def forward(
    module: nn.Module, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, paged: PagedAttention | None
) -> Tensor:
    """Logits ``[R, V]`` of the tokens at indices ``rows_R``; ``paged`` is None while tracing."""
    if paged is None:
        return _forward(module, ids_T, positions_T, rows_R)
    before = _paged.set(paged)
    try:
        return _forward(module, ids_T, positions_T, rows_R)
    finally:
        _paged.reset(before)


def _forward(module: nn.Module, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor) -> Tensor:
    output = module(
        input_ids=ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, logits_to_keep=rows_R
    )
    return output.logits.squeeze(0)


def load(folder: Path, dtype: torch.dtype, max_model_len: int | None) -> LoadedModel:
    """Read the weights of ``folder`` and learn what the model asks of its attention.

    Raises:
        LoadError: a kind that is not supported, by name; or a checkpoint that cannot be read.
    """
    config = read_config(folder)
    limit = limit_of(config, max_model_len)
    settle_rope(config.get_text_config(decoder=True), limit)
    module = read_weights(folder, dtype, config)
    return LoadedModel(module, facts_of(folder, module, config, probe(module, limit)))


def facts_of(folder: Path, module: PreTrainedModel, config: Any, layers: tuple[AttentionSpec, ...]) -> ModelFacts:
    """What is known of ``module``, whose weights may be anywhere."""
    text = config.get_text_config(decoder=True)
    changes = get_model_conversion_mapping(module)
    return ModelFacts(
        architecture=type(module).__name__,
        vocab_size=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        eos_token_ids=token_ids(folder / "config.json", getattr(text, "eos_token_id", None)),
        layers=layers,
        work=work_of(module),
        verbatim=not any(isinstance(change, WeightConverter) for change in changes),
    )


def limit_of(config: Any, asked: int | None) -> int:
    """Tokens of prompt and answer; see `context_limit`."""
    return context_limit(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None), asked)


def work_of(module: PreTrainedModel) -> dict[str, float]:
    """What the weights cost: ``weights_bytes`` in memory, ``read_bytes`` that a decoding step must read, and
    ``flop_per_token`` of a prompt, whose tokens pass every matrix but the embedding and the LM head."""
    embedding = module.get_input_embeddings().weight
    head = module.get_output_embeddings().weight
    weights = list(module.parameters())
    total = sum(weight.nbytes for weight in weights)
    looked_up = 0 if embedding is head else embedding.nbytes
    matrices = (weight for weight in weights if weight.ndim == 2 and weight is not embedding and weight is not head)
    return {
        "weights_bytes": total,
        "read_bytes": total - looked_up,
        "flop_per_token": 2 * sum(weight.numel() for weight in matrices),
    }


def read_config(folder: Path) -> Any:
    """transformers' config of the model in ``folder``. Raises LoadError for a kind that is not supported."""
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = " (its code lies in the model's folder, which is never run)" if "auto_map" in raw else ""
        raise LoadError(f"model type {kind!r} is no decoder that transformers can build{hint}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a broken config makes transformers raise whatever it trips over
        raise LoadError(f"{folder}/config.json is not valid: {type(error).__name__}: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise LoadError(f"model type {kind!r} is an encoder-decoder, which is not supported")
    if quantization := getattr(config, "quantization_config", None):
        if not quantizes_cache_only(quantization):
            raise LoadError("quantized checkpoints are not supported yet; use the unquantized one")
        del config.quantization_config  # transformers would look for a library that reads such weights
    return config


def read_weights(folder: Path, dtype: torch.dtype, config: Any = None) -> PreTrainedModel:
    """The model of ``config`` (None: the folder's own) with its weights, whatever transformers must do to get them.
    Raises LoadError."""
    transformers_logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # as above: truncated files, wrong shapes, unsupported attention
        raise LoadError(f"{folder} cannot be loaded: {type(error).__name__}: {_first_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(problem):
            raise LoadError(f"{folder} is broken: {problem.replace('_', ' ')}: {_shorten(report[problem])}")
    # Dynamo takes a parameter that wants gradients for training and would build a backward graph.
    return module.eval().requires_grad_(False)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _shorten(items: Any) -> str:
    shown = [str(item) for item in items]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
