"""A step's keys and values go to their slots of the cache: one kernel for both on a GPU, plain PyTorch elsewhere."""

from torch import Tensor

from compiled.attention.base import encode


def write(
    operands_TKD: tuple[Tensor, Tensor],
    caches_PSKD: tuple[Tensor, Tensor],
    pages_T: Tensor,
    slots_T: Tensor,
    scales: tuple[float, float],
) -> None:
    """``cache[pages[t], slots[t]] = operand[t]``, as such a cache stores it, for keys and for values, whose caches have
    equal strides. Where several tokens have one slot, which only padding has, any of them may stay."""
    if pages_T.is_cuda:
        # Optional: torch brings Triton for GPUs only.
        from compiled.attention.write_kernel import launch

        launch(operands_TKD, caches_PSKD, pages_T, slots_T, scales)
        return
    for operand, cache, scale in zip(operands_TKD, caches_PSKD, scales, strict=True):
        cache[pages_T, slots_T] = encode(operand, cache.dtype, scale)
