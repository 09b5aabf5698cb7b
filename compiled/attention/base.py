"""The contract of attention backends, and the checks that all of them share.

Owns what FlashInfer's paged wrappers call plan and run: page tables validated once a step on the host (see
`compiled.attention.tables`), and operands validated at every run. Refuses what does not fit by name, with the
numbers. Knows no kernel and no request.

Legend: T tokens in the step, R rows, H query heads, K key/value heads, D size of a query and key head, E of a
value head, P pages, S page size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from compiled.attention.tables import Fixed, Plan, make_plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

Forms = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None, ...]
"""Shapes, strides, dtypes and devices of q, k, v, out and sinks."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """H, K, D, E (``value_dim``; None: D) and the formula. Query head ``h`` reads KV head ``h // (H // K)``.

    A score is ``scale * q·k``, with a ``soft_cap`` c then ``c * tanh(score / c)``. With a ``window`` a token sees
    the last ``window`` positions only, its own included; what no token of the step sees is not read, so that its
    pages may be anything. With ``sinks`` every head has one more score, given to each `Attention.run`, which takes
    its share of the softmax and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    value_dim: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.value_size) < 1:
            raise ValueError(f"heads and head size must be positive: {self}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be positive: {self}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be positive: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def value_size(self) -> int:
        """E."""
        return self.head_dim if self.value_dim is None else self.value_dim


class Attention(ABC):
    """Causal attention of a step's tokens over their own rows' pages, for all layers of one kind.

    ``layers`` holds each layer's keys [P, S, K, D] and values [P, S, K, E], usually views of one page-major
    block of all layers: any strides, but the same ones for all keys and for all values (where E is D, for both)
    and a contiguous last dimension.
    One object serves one step at a time: `plan` once, then `run` once per layer.

    Operands are of the cache's dtype, or of ``dtype`` where the cache is float8_e4m3fn: then ``scales`` are each
    layer's factors of keys and of values, numbers and not tensors. What is stored is the operand divided by its
    factor, limited to ±448 and rounded; what is read is the stored number times its factor.
    """

    name: ClassVar[str]

    @classmethod
    def lacks(
        cls, spec: AttentionSpec, dtype: torch.dtype | None = None, cache: torch.dtype | None = None
    ) -> str | None:
        """What of ``spec``, with operands of ``dtype`` and such a ``cache`` (None: whatever it can), this backend
        cannot do, in words; None: it can do all of it."""
        return None

    def __init__(
        self,
        spec: AttentionSpec,
        layers: Sequence[tuple[Tensor, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        """ValueError if the views do not fit ``spec`` or each other, or the backend `lacks` something."""
        if not layers:
            raise ValueError("layers is empty")
        for number, pair in enumerate(layers):
            for first, view, size in zip(layers[0], pair, (spec.head_dim, spec.value_size), strict=True):
                _check_view(number, first, view, (spec.num_kv_heads, size))
        first, values = layers[0]
        if first.shape[:2] != values.shape[:2] or (first.dtype, first.device) != (values.dtype, values.device):
            raise ValueError(f"keys are {_layout(first)}, values {_layout(values)}")
        if spec.value_size == spec.head_dim and first.stride() != values.stride():
            raise ValueError(f"keys have strides {first.stride()}, values {values.stride()}")
        self.cache_dtype, self.device = first.dtype, first.device
        self.dtype = self.cache_dtype if dtype is None else dtype
        self.scales = _check_scales(self.cache_dtype, self.dtype, len(layers), scales)
        if missing := self.lacks(spec, self.dtype, self.cache_dtype):
            raise ValueError(f"{self.name} attention has no {missing}")
        self.spec = spec
        self.layers = tuple(layers)
        self.pages, self.page_size = first.shape[0], first.shape[1]
        self._planned: Plan | None = None
        self._fitting: Forms | None = None  # what has been checked since the plan
        self._fixed: Fixed | None = None

    def fixed(self, rows: int, row_pages: int | None = None) -> Self:
        """Another object over the same layers whose `run` can be captured in a graph.

        It serves exactly ``rows`` rows of one token each (`pad` fills up), of ``row_pages`` pages (None: of the
        whole cache) on average at most. Its plans all lie at the same addresses, so a captured run reads the latest
        one: **plan before every replay**, and before the capture, with any lengths; what is captured runs inside of
        `capturing`. Tokens behind the planned ones are padding here too.

        `plan` raises ValueError where the rows are not as many, a row has several tokens, or the pages are too
        many; on the CPU `run` raises where a layer runs twice on one plan, which a GPU would do with lengths of
        the past. ValueError, too, from a backend that cannot be captured.
        """
        twin = self._again()
        twin._fixed = Fixed(rows, rows * (self.pages if row_pages is None else row_pages))
        return twin

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, a layer of a `fixed` object may run many times on one plan, as a capture needs it. The plan is spent
        afterwards."""
        if self._fixed is None:
            raise ValueError("only what `fixed` gives can be captured")
        self._fixed.capturing = True
        try:
            yield
        finally:
            self._fixed.capturing = False
            self._planned = None

    def _again(self) -> Self:
        """A new object over the same layers."""
        raise ValueError(f"{self.name} attention cannot be captured in a graph")

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor) -> None:
        """Take the step's rows: int32 CPU tensors of R + 1, R + 1, all pages and R entries.

        The tokens of this step already count in the page tables: row ``r`` has
        ``(pages - 1) * S + kv_last_page_len[r]`` positions. A row has at least one query token.
        ValueError if the tables contradict themselves or the cache; nothing is planned then.
        """
        self._planned = None
        tables = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
        self.take(make_plan(*tables, pages=self.pages, page_size=self.page_size))

    def take(self, plan: Plan) -> None:
        """`plan` with tables that were checked before, for a cache of as many pages of the same size."""
        self._planned = self._fitting = None
        if self._fixed is not None:
            self._fixed.check(plan)
            plan = self._hold(self._fixed, plan)
        self._prepare(plan)
        self._planned = plan

    def run(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, layer: int, out_THE: Tensor, sinks_H: Tensor | None = None
    ) -> None:
        """Write the step's keys and values to their slots, then attend into ``out_THE``.

        Any strides, but a contiguous last dimension. Tokens after the planned ones are padding: their
        keys and values are not written and their rows of ``out_THE`` become zero. ``sinks_H`` is given where
        the spec has sinks, contiguous, in the dtype of the others.
        ValueError if nothing is planned or an operand does not fit.
        """
        if self._planned is None:
            raise ValueError("run before plan")
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} outside 0..{len(self.layers) - 1}")
        # The operands of a step's layers are alike: looking at all there is to check takes half the time of checking.
        forms = (
            (q_THD.shape, q_THD.stride(), q_THD.dtype, q_THD.device),
            (k_TKD.shape, k_TKD.stride(), k_TKD.dtype, k_TKD.device),
            (v_TKE.shape, v_TKE.stride(), v_TKE.dtype, v_TKE.device),
            (out_THE.shape, out_THE.stride(), out_THE.dtype, out_THE.device),
            None if sinks_H is None else (sinks_H.shape, sinks_H.stride(), sinks_H.dtype, sinks_H.device),
        )
        if forms != self._fitting:
            self._check_all(self._planned.tokens, q_THD, k_TKD, v_TKE, out_THE, sinks_H)
            self._fitting = forms
        if self._fixed is not None:
            self._fixed.spend(layer)
        self._run(self._planned, q_THD, k_TKD, v_TKE, layer, out_THE, sinks_H)

    def output(self, tokens: int) -> Tensor:
        """A new ``out_THE``, uninitialised."""
        shape = (tokens, self.spec.num_heads, self.spec.value_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _check_all(
        self, planned: int, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, out_THE: Tensor, sinks_H: Tensor | None
    ) -> None:
        spec, tokens = self.spec, q_THD.shape[0]
        if tokens < planned:
            raise ValueError(f"q has {tokens} tokens but {planned} are planned")
        self._check("q", q_THD, (tokens, spec.num_heads, spec.head_dim))
        self._check("k", k_TKD, (tokens, spec.num_kv_heads, spec.head_dim))
        self._check("v", v_TKE, (tokens, spec.num_kv_heads, spec.value_size))
        self._check("out", out_THE, (tokens, spec.num_heads, spec.value_size))
        if (sinks_H is not None) != spec.sinks:
            raise ValueError("sinks are missing" if spec.sinks else "sinks are given but not in the spec")
        if sinks_H is not None:
            self._check("sinks", sinks_H, (spec.num_heads,))

    def _check(self, name: str, operand: Tensor, shape: tuple[int, ...]) -> None:
        if operand.shape != shape:
            raise ValueError(f"{name} is {tuple(operand.shape)}, not {shape}")
        if operand.dtype != self.dtype or operand.device != self.device:
            raise ValueError(f"{name} is {operand.dtype} on {operand.device}, not {self.dtype} on {self.device}")
        if operand.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, strides are {operand.stride()}")

    def _hold(self, fixed: Fixed, plan: Plan) -> Plan:
        """``plan`` as the runs of a graph find it."""
        return fixed.hold(plan)

    def _prepare(self, plan: Plan) -> None:
        """What a backend computes once a step from a checked plan."""

    @abstractmethod
    def _run(
        self,
        plan: Plan,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        layer: int,
        out_THE: Tensor,
        sinks_H: Tensor | None,
    ) -> None:
        """`run` with everything checked."""


def _check_view(number: int, first: Tensor, view: Tensor, heads_and_size: tuple[int, int]) -> None:
    if view.dim() != 4 or view.shape[2:] != heads_and_size:
        raise ValueError(
            f"a layer's view must be [P, S, {heads_and_size[0]}, {heads_and_size[1]}], not {tuple(view.shape)}"
        )
    if view.dtype not in (*DTYPES, FP8):
        raise ValueError(f"KV cache must be float32, bfloat16, float16 or float8_e4m3fn, not {view.dtype}")
    if view.stride(3) != 1:
        raise ValueError(f"KV cache: the last dimension must be contiguous, strides are {view.stride()}")
    if _layout(view) != _layout(first):
        raise ValueError(f"layer {number} has another layout: {_layout(view)}, not {_layout(first)}")


def encode(operand: Tensor, cache: torch.dtype, scale: float) -> Tensor:
    """``operand`` as a cache of dtype ``cache`` stores it."""
    if cache != FP8:
        return operand
    return (operand.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _check_scales(
    cache: torch.dtype, dtype: torch.dtype, layers: int, scales: Sequence[tuple[float, float]] | None
) -> tuple[tuple[float, float], ...]:
    if cache == FP8:
        if dtype not in DTYPES:
            raise ValueError(f"operands beside a float8_e4m3fn cache must be of one of {DTYPES}, not {dtype}")
        if scales is None or len(scales) != layers:
            raise ValueError(f"a float8_e4m3fn cache of {layers} layers has {len(scales or ())} pairs of scales")
        for layer, pair in enumerate(scales):
            if not all(0 < scale < float("inf") for scale in pair):
                raise ValueError(f"layer {layer}: scales must be positive and finite, not {pair}")
        return tuple(scales)
    if dtype != cache:
        raise ValueError(f"operands are {dtype} but the KV cache is {cache}")
    if scales is not None:
        raise ValueError(f"scales are given, but the KV cache is {cache}")
    return ((1.0, 1.0),) * layers


def _layout(view: Tensor) -> tuple[object, ...]:
    return tuple(view.shape), view.stride(), view.dtype, view.device
