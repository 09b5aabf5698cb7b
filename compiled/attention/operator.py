"""The operator that stands for attention in a model's graph: where a traced graph is cut."""

import torch
from torch import Tensor


@torch.library.custom_op("streamengine::attention", mutates_args=())
def attention(q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """It carries no layer: the order of the cuts is the order of the layers."""
    raise RuntimeError("streamengine::attention marks a cut in a traced graph and is never executed")


@attention.register_fake
def _(q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    return q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], v_TKE.shape[2])


TARGETS = {torch.ops.streamengine.attention, torch.ops.streamengine.attention.default}
"""What a node of a graph calls if it is this operator."""
