"""The factors of a float8 KV cache that a checkpoint brings, where its makers have calibrated them.

One number for the keys and one for the values of a layer, by the names that compressed-tensors (``self_attn.k_scale``)
and modelopt (``self_attn.k_proj.k_scale``) give them, or ``kv_scale`` for both: what is stored is divided by it.
"""

import logging
import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiled.parameters import MissingTensor, weight_files
from compiled.step import LoadError
from compiled.weights import read_json

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?:^|.*?\.)(\d+)\.(?:\w+\.)*(kv|k|v)_scale")
"""The first number in a tensor's name is its layer's."""

_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""Of compressed-tensors, which names what it does; what it leaves out is this."""


def quantizes_cache_only(quantization: Any) -> bool:
    """Whether a config's ``quantization_config`` is about the KV cache and leaves the weights as they are."""
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in ("compressed-tensors", "modelopt"):
        return False
    weights = ("config_groups", "quant_algo", "sparsity_config", "transform_config", "quantization")
    cache = ("kv_cache_scheme", "kv_cache_quant_algo")
    return any(map(quantization.get, cache)) and not any(map(quantization.get, weights))


def read_scales(folder: Path, layers: int) -> list[tuple[float, float]]:
    """``(keys, values)`` of each layer; 1.0 where the checkpoint in ``folder`` has none at all.

    Raises:
        LoadError: it has some for another kind of cache, or of which nobody knows what they mean, by name.
    """
    _check_scheme(read_json(folder / "config.json").get("quantization_config"))
    found: dict[tuple[int, str], float] = {}
    for name, layer, kind, tensor in _tensors(folder):
        for one in kind:
            if layer >= layers or (layer, one) in found:
                why = f"the model has {layers} layers" if layer >= layers else f"layer {layer} has two of them"
                raise LoadError(f"kv_dtype fp8_e4m3: {name} is a factor of the KV cache's {one}, but {why}")
            found[layer, one] = _number(name, tensor)
    if not found:
        log.info("the checkpoint has no factors for a float8 KV cache: 1.0 everywhere")
        return [(1.0, 1.0)] * layers
    missing = [f"layer {layer}'s {one}" for layer in range(layers) for one in "kv" if (layer, one) not in found]
    if missing:
        raise LoadError(f"kv_dtype fp8_e4m3: the checkpoint has factors of the KV cache, but none for {missing[0]}")
    log.info("factors of the float8 KV cache: the checkpoint's, %.3g to %.3g", min(found.values()), max(found.values()))
    return [(found[layer, "k"], found[layer, "v"]) for layer in range(layers)]


def _check_scheme(quantization: Any) -> None:
    quantization = quantization if isinstance(quantization, dict) else {}
    scheme, algorithm = quantization.get("kv_cache_scheme"), quantization.get("kv_cache_quant_algo")
    for field, value in scheme.items() if isinstance(scheme, dict) else ():
        if field in _SCHEME and value != _SCHEME[field]:
            raise LoadError(
                f"kv_dtype fp8_e4m3: the checkpoint's kv_cache_scheme has {field} {value!r}, not {_SCHEME[field]!r}"
            )
    if algorithm not in (None, "FP8"):
        raise LoadError(f"kv_dtype fp8_e4m3: the checkpoint's kv_cache_quant_algo is {algorithm!r}, not 'FP8'")


def _tensors(folder: Path) -> Iterable[tuple[str, int, str, Tensor]]:
    """Name, layer, "k", "v" or "kv", and what is there."""
    with ExitStack() as stack:
        try:
            for path in weight_files(folder):
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if match := _NAME.fullmatch(name):
                        yield name, int(match[1]), match[2], file.get_tensor(name)
        except (OSError, ValueError, SafetensorError, MissingTensor) as error:
            raise LoadError(f"kv_dtype fp8_e4m3: {folder} cannot be searched for factors: {error}") from error


def _number(name: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise LoadError(f"kv_dtype fp8_e4m3: {name} has shape {list(tensor.shape)}; there is one number a layer")
    value = float(tensor.float().reshape(()))
    if not (math.isfinite(value) and value > 0):
        raise LoadError(f"kv_dtype fp8_e4m3: {name} is {value}; a factor is a positive number")
    return value
