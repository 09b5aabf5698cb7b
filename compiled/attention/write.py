"""A step's keys and values go to their slots of the cache."""

import torch
from torch import Tensor

from compiled.attention.base import encode


def write(operand_TKD: Tensor, cache_PSKD: Tensor, pages_T: Tensor, slots_T: Tensor, scale: float) -> None:
    """``cache[pages[t], slots[t]] = operand[t]``, as such a cache stores it. Where several tokens have one slot, which
    only padding has, any of them may stay."""
    stored = encode(operand_TKD, cache_PSKD.dtype, scale)
    if stored.element_size() == 1:  # not every device can index float8 numbers
        stored, cache_PSKD = stored.view(torch.uint8), cache_PSKD.view(torch.uint8)
    cache_PSKD.index_put_((pages_T, slots_T), stored)
