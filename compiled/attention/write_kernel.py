# mypy: disable-error-code="no-untyped-def"
"""`compiled.attention.write` in Triton: plain PyTorch takes two launches for it, and ten where the cache is float8."""

import triton
import triton.language as tl
from torch import Tensor

from compiled.attention.base import FP8, FP8_MAX

Pair = tuple[Tensor, Tensor]


def launch(
    operands_TKD: Pair, caches_PSKD: Pair, pages_T: Tensor, slots_T: Tensor, scales: tuple[float, float]
) -> None:
    (k, v), (keys, values) = operands_TKD, caches_PSKD
    tokens, heads, size = k.shape
    write[tokens, 2](
        k, v, keys, values, pages_T, slots_T, *scales, *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3],
        SIZE=size, NUMBERS=heads * size, BLOCK=triton.next_power_of_2(heads * size), FLOAT8=keys.dtype == FP8,
        LIMIT=FP8_MAX,
    )  # fmt: skip


@triton.jit
def write(
    k, v, keys, values, pages, slots, k_scale, v_scale, k_token, k_head, v_token, v_head, page, slot, head,
    SIZE: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, FLOAT8: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A program is a token's keys or its values; names in the middle of the list are strides."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    within, row, column = number < NUMBERS, number // SIZE, number % SIZE
    if tl.program_id(1) == 0:
        source, cache, scale = k + token * k_token + row * k_head, keys, k_scale
    else:
        source, cache, scale = v + token * v_token + row * v_head, values, v_scale
    operand = tl.load(source + column, mask=within)
    if FLOAT8:
        exact = tl.math.div_rn(operand.to(tl.float32), scale)
        operand = tl.clamp(exact, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    place = tl.load(pages + token) * page + tl.load(slots + token) * slot
    tl.store(cache + place + row * head + column, operand, mask=within)
