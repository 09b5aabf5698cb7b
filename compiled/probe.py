"""What a model asks of its attention, learnt by running it and never from a list of names.

A few tokens go through the real modelling code with an attention that computes nothing and notes every call.
The weights stand in for themselves: each is one row, repeated without memory, so that a model may be asked before
a byte of it is read. Whatever a paged, causal, cacheless forward pass could not give is refused, with the reason.

Owns the questions: the shape of each call, who sees whom, whether tokens meet anywhere but in attention, and
whether positions mean what the runner means by them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import PreTrainedModel

from compiled.attention.base import AttentionSpec
from compiled.step import LoadError

PROBE = "streamengine_probe"

HARMLESS = {"position_ids", "dropout", "use_cache", "cache", "output_attentions", "is_causal", "logits_to_keep"}
KNOWN = {"sliding_window", "softcap", "s_aux"}
"""Keyword arguments of an attention call that say nothing new to a paged, causal, cacheless forward pass, and
those that are looked at. Any other that is neither None nor False is refused by name."""

SOFTMAX = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that hold nothing but keys and values, in transformers' words."""

_TOKENS, _TAINTED, _CLEAN = 3, 1, [0, 2]
_asked: ContextVar["Probe"] = ContextVar("asked")


class Probe:
    """Stands in for the attention of every layer: notes what is asked, and mixes nothing."""

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[AttentionSpec] = []
        self.operands: list[list[float]] = []
        self.meets = False
        self._max_model_len = max_model_len

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        name = type(module).__name__
        for argument, given in kwargs.items():
            if argument not in HARMLESS | KNOWN and given is not None and given is not False:
                raise LoadError(f"{name} asks its attention for {argument!r}, which is not supported")
        if key.shape[2] != query.shape[2]:
            raise LoadError(f"{name} attends to {key.shape[2]} keys for {query.shape[2]} tokens, not to its own")
        heads, size, value_size = query.shape[1], query.shape[3], value.shape[3]
        self.layers.append(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=key.shape[1],
                head_dim=size,
                scale=size**-0.5 if scaling is None else float(scaling),
                window=self._window(module, mask, kwargs),
                value_dim=None if value_size == size else value_size,
                soft_cap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux") is not None,
            )
        )
        self.note(query)
        self.note(key)
        return value.transpose(1, 2).repeat_interleave(heads // key.shape[1], dim=2)

    def note(self, operand: Tensor) -> None:
        """Remember what ``operand`` [.., T, ..] has of the tokens that are numbers."""
        if operand.dim() > 1 and operand.shape[-2] == _TOKENS:
            self.operands.append(operand[..., _CLEAN, :].flatten().tolist())

    def _window(self, module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> int | None:
        """How far back a token sees; None: all that fits. A mask says it best, where the model has one."""
        name = type(module).__name__
        if mask is None:
            causal = kwargs.get("is_causal")
            if not (getattr(module, "is_causal", True) if causal is None else causal):
                raise LoadError(f"{name} is not causal: only decoders are supported")
            window = kwargs.get("sliding_window")
        else:
            root = mask if mask._base is None else mask._base
            if (sees := getattr(root, "sees", None)) is None:
                raise LoadError(f"{name} builds an attention mask of its own, which paged attention does not take")
            window = _window_of(name, sees, self._max_model_len)
        return None if window is None or window >= self._max_model_len else window


def probe(module: PreTrainedModel, max_model_len: int) -> tuple[AttentionSpec, ...]:
    """The attention calls of a forward pass, in order.

    Raises:
        LoadError: naming what the model does that cannot be done in pages.
    """
    name = type(module).__name__
    accepted = inspect.signature(module.forward).parameters
    for argument in ("input_ids", "position_ids", "logits_to_keep"):
        if argument not in accepted:
            raise LoadError(f"{name} takes no {argument}")
    if module._is_stateful and (kinds := set(getattr(module.config, "layer_types", None) or ["a state"]) - SOFTMAX):
        raise LoadError(f"{name} keeps {', '.join(sorted(kinds))} in its layers beside keys and values")
    try:
        with _asking(module):
            given, counted, late = (_run(module, max_model_len, way) for way in ("given", "counted", "late"))
    except LoadError:
        raise
    except Exception as error:  # a config that transformers accepts and cannot run
        raise LoadError(f"{name} does not run: {type(error).__name__}: {error}") from error
    if not given.layers:
        raise LoadError(f"{name} has no attention that can be replaced")
    if given.meets:
        raise LoadError(
            f"{name} lets tokens meet outside of its attention (in a convolution, a recurrence or a state), "
            "which pages of keys and values do not hold"
        )
    if counted.operands != given.operands:
        raise LoadError(f"{name} does not count positions from 0 upwards")
    if late.operands != given.operands:
        raise LoadError(
            f"{name} counts positions by itself, not as they are given, which shows before position {max_model_len}: "
            "lower max_model_len"
        )
    return tuple(given.layers)


def _run(module: PreTrainedModel, max_model_len: int, way: str) -> Probe:
    """Positions are ``given``, or ``counted`` by the model itself; or they are given and the model is ``late``: what
    it counts nevertheless ends where the context ends."""
    seen = Probe(max_model_len)
    arguments = {
        "input_ids": torch.full((1, _TOKENS), 3),
        "position_ids": None if way == "counted" else torch.arange(_TOKENS).unsqueeze(0),
        "use_cache": False,
        "logits_to_keep": torch.arange(_TOKENS),
    }
    before = _asked.set(seen)
    watch = _Watch(seen, max_model_len - _TOKENS if way == "late" else 0)
    try:
        with torch.no_grad(), _tainted(module), watch:
            output = functional_call(module, _thin(module), (), arguments)
    finally:
        _asked.reset(before)
    seen.meets = bool(output.logits[:, _CLEAN].isnan().any())
    return seen


def _thin(module: nn.Module) -> dict[str, Tensor]:
    """For each parameter, and each buffer without memory, one of its shape and type that is one row, repeated."""
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if buffer.is_meta)
    thin = {}
    for name, tensor in (*module.named_parameters(), *buffers):
        row = torch.linspace(-0.1, 0.2, tensor.shape[-1]) if tensor.dim() else torch.tensor(0.1)
        thin[name] = row.to(tensor.dtype).expand(tensor.shape)
    return thin


@contextmanager
def _asking(module: PreTrainedModel) -> Iterator[None]:
    """With the attention that notes, and experts that take weights of any strides."""
    attention, experts = module.config._attn_implementation, module.get_experts_implementation()
    module.set_attn_implementation(PROBE)
    module.set_experts_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(attention)
        module.set_experts_implementation(experts)


@contextmanager
def _tainted(module: PreTrainedModel) -> Iterator[None]:
    """Make one token not a number: whatever takes something from it is none either."""

    def taint(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        return embedded.index_fill(-2, torch.tensor([_TAINTED]), torch.nan)

    hook = module.get_input_embeddings().register_forward_hook(taint)
    try:
        yield
    finally:
        hook.remove()


class _Watch(TorchDispatchMode):
    """Notes the rows that are looked up in tables, and adds ``lateness`` to whatever counts the tokens."""

    def __init__(self, probe: Probe, lateness: int) -> None:
        super().__init__()
        self._probe, self._lateness = probe, lateness

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self._probe.note(args[1].unsqueeze(-1))
        result = func(*args, **(kwargs or {}))
        counts = func.overloadpacket is torch.ops.aten.arange and result.numel() == _TOKENS
        return result + self._lateness if counts and self._lateness > 0 else result


def _window_of(name: str, sees: Callable[..., Tensor], limit: int) -> int | None:
    """The window that ``sees(batch, head, query, key)`` is, looked at from the end and the middle of a context."""
    positions = torch.arange(limit)
    zero = torch.tensor(0)

    def seen_from(position: int) -> Tensor:
        return sees(zero, zero, torch.tensor(position), positions).expand(limit)

    try:
        last = int(seen_from(limit - 1).sum())
        for at in {limit - 1, max(limit - 2, 0), limit // 2}:
            seen = seen_from(at)
            if bool(seen[at + 1 :].any()):
                raise LoadError(f"{name} is not causal: only decoders are supported")
            if not torch.equal(seen, (positions <= at) & (positions > at - last)):
                chunk = int(seen_from(limit - last - 1).sum())
                raise LoadError(
                    f"{name} attends within chunks of {chunk} positions, which is supported up to the first chunk's "
                    f"end: lower max_model_len from {limit} to {chunk}"
                )
    except IndexError:
        raise LoadError(f"{name} has an attention mask that depends on the tokens") from None
    return last


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return _asked.get()(module, query, key, value, attention_mask, scaling, kwargs), None


def _tell(q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """A mask that says what it was made from."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    mask.sees = mask_function
    return mask


AttentionInterface.register(PROBE, _look)
AttentionMaskInterface.register(PROBE, _tell)
