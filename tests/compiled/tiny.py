"""Tiny random checkpoints of several architectures, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.25},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32},
}


def make(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a checkpoint of ``kind`` with random weights into ``folder``."""
    fields = {key: value for key, value in (BASE | KINDS.get(kind, {}) | changes).items() if value is not None}
    config = AutoConfig.for_model(kind, **fields)
    for key, value in (KINDS.get(kind, {}) | changes).items():
        if value is None and hasattr(config, key):
            setattr(config, key, None)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder
