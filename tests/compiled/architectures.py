"""Every causal architecture of the installed transformers as a tiny random model, made by rules on its config.

Nothing here knows an architecture by its name: a rule speaks of a field that any config may have.
"""

import re
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128

SIZES: tuple[tuple[str, int], ...] = (
    # The first pattern that matches a field's whole name gives its size.
    (r".*vocab_size.*|audio_vocab_size|codebook_size", VOCABULARY),
    (r"vocab_offset", 0),
    (r"(pad|bos|eos|cls|sep|eod|boa|boi|eoi|eoa)_token_id", 0),
    (r"(image|audio|video|boi|eoi|eoa).*_token_(id|index)", VOCABULARY - 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|original_max_position_embeddings", 128),
    (r"sliding_window|attention_window_size|local_attention|keep_window_size", 8),
    (r"max_window_layers", 1),
    (r"(global_attn_every_n_layers|.*sliding_window_pattern|no_rope_layer_interval|interleave_moe_layer_step)", 2),
    (r"hidden_size_per_layer_input", 16),
    (
        r"hidden_size|n_embd|d_model|embedding_size|word_embed_proj_dim|lru_width|dim_model_base|adapter_(in_dim|out_dim|input_size)",
        64,
    ),
    (r"(num_attention_heads|n_heads?|attention_heads|index_n_heads)", 4),
    (r"num_key_value_heads|kv_n_heads", 2),
    (r"[HL]_cycles", 1),
    (r"head_dim|kv_channels", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_nope_head_dim|index_head_dim", 16),
    (r"qk_head_dim", 24),
    (r"v_head_dim", 16),
    (r"index_block_size", 4),
    (r"index_topk_blocks|index_local_blocks", 1),
    (r"(q|kv|o)_lora_rank|.*_rank", 32),
    (r".*intermediate_size.*|ffn_dim|n_inner|ffn_hidden_size|expert_ffn_hidden_size|dff|router_hidden_size", 48),
    (r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_(input|recurrent|output)_layers", 1),
    (r"n_group|topk_group|.*num_shared_experts|n_shared_experts|first_k_dense_replace|num_dense_layers", 1),
)
EMPTY = re.compile(
    r"head_dim|num_key_value_heads|(n_routed|n_shared|num|top_k)_experts|num_experts_per_tok|moe_intermediate_size"
)
"""Fields that are sized even where the default config leaves them out."""

LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers")
PER_LAYER = "per_layer_config"

FLAGS = {"use_sliding_window": True, "is_decoder": True, "enable_moe_block": True, "initializer_range": 0.2}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "dory": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots3_note": {
        "text_config": {"head_dim": 24, "per_layer_config": {"2": {"kv_lora_rank": 16}}},
    },
    "dots3_note_text": {"head_dim": 24, "per_layer_config": {"2": {"kv_lora_rank": 16}}},
    "gemma4_assistant": {
        "text_config": {
            "enable_moe_block": False,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "layer_types": ["mamba", "attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What no rule can know: configs whose defaults alone do not make a model."""

UNBUILDABLE: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}
"""Configs that cannot even be made from their defaults."""


def causal_types() -> dict[str, str]:
    """Type → class of those whose attention can be replaced."""
    return {
        kind: name
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if getattr(getattr(transformers, name), "_supports_attention_backend", False)
    }


def shrink(kind: str, **changes: Any) -> Any:
    """A config of ``kind`` with one layer of each kind that the default config has, at least two, and ``changes``."""
    config, changes = CONFIG_MAPPING[kind], OVERRIDES.get(kind, {}) | changes
    fields = _shrink(config(**UNBUILDABLE.get(kind, {})))
    for name, value in changes.items():
        fields[name] = fields[name] | value if name.endswith("_config") and name != PER_LAYER else value
    return config(**fields)


def _shrink(config: Any) -> dict[str, Any]:
    default = config.to_dict()
    depth = next((value for name, value in default.items() if LAYERS.fullmatch(name)), None)
    kept = _one_of_each(default, depth) if depth else []
    fields: dict[str, Any] = {}
    for name, value in default.items():
        if (
            name in config.sub_configs
            or hasattr(value, "to_dict")
            or (isinstance(value, dict) and "model_type" in value)
        ):
            fields[name] = None if value is None else _shrink(getattr(config, name))
        elif LAYERS.fullmatch(name):
            fields[name] = len(kept)
        elif name == PER_LAYER:
            fields[name] = {
                str(new): {key: 2 * _size(key, own) for key, own in value[f"{old:02}"].items() if "num_" not in key}
                for new, old in enumerate(kept)
                if f"{old:02}" in (value or {})
            }
        elif name == "rope_parameters":
            fields[name] = _rope(value)
        elif isinstance(value, list) and len(value) == depth and depth:
            fields[name] = [_size(name, value[i]) for i in kept]
        else:
            fields[name] = _size(name, value)
    if "num_kv_shared_layers" in fields:
        fields["num_kv_shared_layers"] = len(kept) // 2
    if "kv_lora_rank" in fields:  # keys and values of all heads are made from one latent vector
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if "max_window_layers" in fields:  # made from this number then
        fields.pop("layer_types", None)
    for name in ("transformers_version", "architectures", "model_type", "moe_layers", "id2label", "label2id"):
        fields.pop(name, None)
    return fields


def _rope(parameters: dict[str, Any] | None) -> Any:
    """With what begins at a distance beginning within a few tokens."""
    return {
        name: _rope(value) if isinstance(value, dict) else 16 if name == "original_max_position_embeddings" else value
        for name, value in (parameters or {}).items()
    } or parameters


def _size(name: str, value: Any) -> Any:
    if name in FLAGS:
        return FLAGS[name]
    if name == "attn_logit_softcapping" and value:
        return 1.0  # low enough to matter
    number = isinstance(value, int) and not isinstance(value, bool)
    if not number and not (value is None and EMPTY.fullmatch(name)):
        return value
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)


def _one_of_each(default: dict[str, Any], depth: int) -> list[int]:
    """The first layer of each kind, by all that the config says of single layers; twice where layers share keys."""
    lists = [value for value in default.values() if isinstance(value, list) and len(value) == depth]
    single = default.get(PER_LAYER) or {}
    lists = [each for each in lists if len({repr(one) for one in each}) < depth]  # not the layers' numbers
    kinds = [repr([*(each[i] for each in lists), single.get(f"{i:02}")]) for i in range(depth)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    kept = first if len(first) > 1 else [0, 1]
    return kept * 2 if "num_kv_shared_layers" in default else kept


def build(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model of ``shrink(kind)`` in which no parameter is the same number throughout."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrink(kind, **changes), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and float(parameter.std()) == 0:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
