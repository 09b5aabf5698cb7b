"""Before a fresh compile is trusted, it and transformers' own code say something about the same few tokens.

transformers runs them at once, with its own attention and masks and the weights as they were read; the runner runs
them in steps of many, two and one, with pages, merged and packed weights. A wrong kernel, a parameter at another's
place in any layer, a wrong layout or a misread attention shows as logits that differ by more than rounding.

How much rounding may do depends on the model. In float32 it is a constant. Below it is measured: transformers'
own result is compared with what the same weights give in float32 arithmetic, and the compiled one may be
`HEADROOM` times as far from that. What counts is the median over the tokens, since a single one may be chaotic
(SmolLM2 in bfloat16: 0.05, and 0.18 for one token of twelve; one wrong matrix in one layer: 0.10 to 2): of those in
steps of one token and of the others, because no trace has seen a size of 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from compiled.step import PADDING_PAGE, LoadError, Row, Step

CHUNKS = (5, 2, 1, 1, 1, 1, 1)
"""Tokens of the steps: a prompt's chunk, a verified guess, decoding steps."""

HEADROOM = 2.5
LEAST = 1e-3
"""Difference that is always allowed, in float32 all that is."""

_STRIDE = 7919
"""A prime: the tokens are spread over any vocabulary."""


@dataclass(frozen=True)
class Expected:
    """``logits_TV`` of the tokens, and how far the same code may be from them by rounding alone."""

    tokens: tuple[int, ...]
    logits_TV: Tensor
    tolerance: float


@dataclass(frozen=True)
class Check:
    """How far the compiled logits were from the expected ones, relative to these: the larger of the two medians
    over the tokens, the largest, and at which token."""

    difference: float
    largest: float
    token: int
    tolerance: float


def expect(module: nn.Module, tensors: Mapping[str, Tensor], vocab_size: int) -> Expected:
    """Run ``module``, a transformers model, with ``tensors`` as its parameters and buffers; it needs none of its
    own, and keeps its attention implementation in the end."""
    tokens = tuple(_STRIDE * (i + 1) % vocab_size for i in range(sum(CHUNKS)))
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            own_TV = _logits(module, tensors, tokens)[:, :vocab_size]
            if own_TV.dtype == torch.float32:
                return Expected(tokens, own_TV, LEAST)
            with _InFloat32():
                exact_TV = _logits(module, tensors, tokens)[:, :vocab_size]
    finally:
        module.set_attn_implementation(before)
    rounding = float(_differences(own_TV, exact_TV).median())
    return Expected(tokens, exact_TV, max(LEAST, HEADROOM * rounding))


def steps(expected: Expected, page_size: int) -> list[Step]:
    """The same tokens for a runner, which computes the logits of each: on the pages behind the padding page."""
    pages = tuple(range(PADDING_PAGE + 1, PADDING_PAGE + 2 + len(expected.tokens) // page_size))
    made, start = [], 0
    for number, count in enumerate(CHUNKS):
        tokens = expected.tokens[start : start + count]
        made.append(Step(number, (Row(0, tokens, start, pages, targets=tokens),)))
        start += count
    return made


def check(expected: Expected, page_size: int, run: Callable[[Step], Tensor]) -> Check:
    """``run`` gives a step's logits.

    Raises:
        LoadError: they are not those of the uncompiled model.
    """
    got_TV = torch.cat([run(step) for step in steps(expected, page_size)])
    differences_T = _differences(got_TV, expected.logits_TV)
    token = int(differences_T.nan_to_num(torch.inf).argmax())
    alone_T = torch.tensor([count == 1 for count in CHUNKS for _ in range(count)])
    median = max(float(differences_T[which_T].median()) for which_T in (alone_T, ~alone_T))
    found = Check(median, float(differences_T[token]), token, expected.tolerance)
    if not found.difference <= found.tolerance or not bool(got_TV.isfinite().all()):
        raise LoadError(
            f"the compiled model does not compute what the uncompiled one does: its logits differ by "
            f"{found.difference:.2g} (median over {len(expected.tokens)} tokens; largest {found.largest:.2g} at token "
            f"{found.token}), allowed is {found.tolerance:.2g}; use --eager, and report this"
        )
    return found


def _logits(module: nn.Module, tensors: Mapping[str, Tensor], tokens: tuple[int, ...]) -> Tensor:
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens)).unsqueeze(0)
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    output: Any = functional_call(module, dict(tensors), kwargs=arguments)
    logits: Tensor = output.logits[0]
    return logits


def _differences(got_TV: Tensor, want_TV: Tensor) -> Tensor:
    """For each token the distance of its logits, relative to how far the wanted ones are from their mean: a constant
    added to all of them changes nothing."""
    want = want_TV.float() - want_TV.float().mean(-1, keepdim=True)
    got = got_TV.float() - got_TV.float().mean(-1, keepdim=True)
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)


class _InFloat32(TorchDispatchMode):
    """Every operation computes in float32, whatever its operands' and its own type: weights are widened as they are
    used, one at a time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return torch.float32 if value in (torch.bfloat16, torch.float16) else value
