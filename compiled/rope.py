"""Rotary frequencies that depend on how long the longest sequence of a batch is, settled for good at load.

transformers chooses such frequencies anew in each forward pass. In pages that would be wrong twice: keys that are
already there keep the frequencies they were made with, and one request would change another's. So the choice is
made once, for the context that is served, as transformers makes it for one sequence of that length.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_SETTLED = {"longrope": "settled_longrope", "dynamic": "settled_ntk"}
"""A kind whose frequencies depend on the length → one that is computed in the same way, and never again."""

_LENGTH = "settled_length"


def settle_rope(config: Any, length: int) -> None:
    """Change ``config`` so that the model built from it has the rotary frequencies of sequences of ``length``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for one in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):
        if (kind := one.get("rope_type")) in _SETTLED:
            one |= {"rope_type": _SETTLED[kind], _LENGTH: length}


def _register(kind: str) -> None:
    compute = ROPE_INIT_FUNCTIONS[kind]

    def settled(
        config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
    ) -> tuple[Tensor, float]:
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        frequencies, scale = compute(config, device, seq_len=parameters[_LENGTH], layer_type=layer_type)
        return frequencies, scale

    ROPE_INIT_FUNCTIONS[_SETTLED[kind]] = settled


for _kind in _SETTLED:
    _register(_kind)
