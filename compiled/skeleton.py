"""A transformers model without its weights: parameters have shapes and no memory.

Good for learning what a model does (`compiled.outline`) and for tracing it, which looks at no parameter's numbers.
Buffers that no checkpoint holds, such as rotary frequencies, are computed as transformers computes them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from compiled.model import ATTENTION
from compiled.recipe import Held


def build_skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config``, all of it on the meta device."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    _keep_in_float32(module, dtype)
    return module.eval().requires_grad_(False)


def _keep_in_float32(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """What `from_pretrained` does to the parameters that a model wants in float32 whatever is asked for."""
    if dtype == torch.float32:
        return
    kept = module._keep_in_fp32_modules_strict or ()
    for name, child in module.named_modules():
        for own, parameter in child._parameters.items():
            path = f"{name}.{own}".split(".")
            if parameter is not None and any(_contains(path, part.split(".")) for part in kept):
                child._parameters[own] = nn.Parameter(parameter.float(), requires_grad=False)


def _contains(path: list[str], part: list[str]) -> bool:
    return any(path[i : i + len(part)] == part for i in range(len(path) - len(part) + 1))


def compute_buffers(module: PreTrainedModel) -> dict[str, Tensor]:
    """Give ``module`` the buffers that no checkpoint holds, on the CPU and with their values; returned by name."""
    for tensor in module.parameters():
        tensor._is_hf_initialized = True
    for buffer in module.buffers():
        buffer._is_hf_initialized = True
    names = [name for name, _ in module.named_non_persistent_buffers()]
    for name in names:
        owner, _, own = name.rpartition(".")
        parent = module.get_submodule(owner)
        parent._buffers[own] = torch.empty_like(parent._buffers[own], device="cpu")
    module.initialize_weights()
    return {name: module.get_buffer(name) for name in names}


def named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers; the first name of each that has several."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def held_tensors(module: PreTrainedModel, buffers: Mapping[str, Tensor]) -> dict[str, Held]:
    """What a checkpoint must have: all parameters, and all buffers but ``buffers``."""
    tensors = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in buffers}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    first = dict(named_tensors(module))
    return {
        name: Held(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(alias for alias in names[id(tensor)] if alias != name),
        )
        for name, tensor in first.items()
        if id(tensor) in names
    }


def give_memory(module: nn.Module) -> None:
    """Put what is still on the meta device onto the CPU, uninitialised: pages of memory that are never touched are
    never given. A tensor that has several names stays one tensor."""
    moved: dict[int, Any] = {}
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in moved:
                        empty = torch.empty_like(tensor, device="cpu")
                        keep = nn.Parameter(empty, requires_grad=False) if tensors is child._parameters else empty
                        moved[id(tensor)] = (keep, tensor)  # the old one lives on, so that its id is not another's
                    tensors[name] = moved[id(tensor)][0]
