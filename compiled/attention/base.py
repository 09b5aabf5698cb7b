"""The contract of attention backends, and the checks that all of them share.

Owns what FlashInfer's paged wrappers call plan and run: page tables as indptr, indices and last page
length, validated once a step on the host, and operands validated at every run. Refuses anything that
would read or write outside a row's own pages, with the numbers. Knows no kernel and no request.

Legend: T tokens in the step, R rows, H query heads, K key/value heads, D size of a query and key head, E of a
value head, P pages, S page size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's rows, checked. All tensors are int32 on the CPU, contiguous, and nobody else's.

    Row ``r`` has tokens ``qo_indptr[r] .. qo_indptr[r + 1] - 1`` of the step, which are the last of its
    ``kv_lens[r]`` positions, and pages ``kv_indices[kv_indptr[r] : kv_indptr[r + 1]]``.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    kv_lens: Tensor
    tokens: int

    @property
    def rows(self) -> int:
        """R."""
        return self.kv_lens.numel()


def make_plan(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *, pages: int, page_size: int
) -> Plan:
    """Copy and check a step's page tables. ValueError names the tensor and the first bad entry."""
    tables = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_len": kv_last_page_len,
    }
    for name, table in tables.items():
        if table.dtype != torch.int32 or table.device.type != "cpu" or table.dim() != 1:
            raise ValueError(
                f"{name} must be a one-dimensional int32 tensor on the CPU, "
                f"not {table.dtype} {tuple(table.shape)} on {table.device}"
            )
    rows = kv_last_page_len.numel()
    if rows < 1:
        raise ValueError("kv_last_page_len has no rows")
    qo_lens = _lengths("qo_indptr", qo_indptr, rows)
    page_counts = _lengths("kv_indptr", kv_indptr, rows)
    if int(kv_indptr[-1]) != kv_indices.numel():
        raise ValueError(f"kv_indptr ends at {int(kv_indptr[-1])} but kv_indices has {kv_indices.numel()} entries")
    _refuse("kv_indices", kv_indices, (kv_indices < 0) | (kv_indices >= pages), f"outside 0..{pages - 1}")
    last = kv_last_page_len
    _refuse("kv_last_page_len", last, (last < 1) | (last > page_size), f"outside 1..{page_size}")
    kv_lens = (page_counts - 1) * page_size + kv_last_page_len
    if bool((qo_lens > kv_lens).any()):
        row = int((qo_lens > kv_lens).nonzero()[0])
        raise ValueError(f"row {row} has {int(qo_lens[row])} query tokens but a kv length of {int(kv_lens[row])}")
    return Plan(
        qo_indptr=_own(qo_indptr),
        kv_indptr=_own(kv_indptr),
        kv_indices=_own(kv_indices),
        kv_last_page_len=_own(kv_last_page_len),
        kv_lens=kv_lens,
        tokens=int(qo_indptr[-1]),
    )


def _lengths(name: str, indptr: Tensor, rows: int) -> Tensor:
    """Differences of an index pointer that must start at 0 and rise by at least one at every row."""
    if indptr.numel() != rows + 1:
        raise ValueError(f"{name} has {indptr.numel()} entries, not {rows + 1} for {rows} rows")
    if int(indptr[0]) != 0:
        raise ValueError(f"{name}[0] is {int(indptr[0])}, not 0")
    lengths = indptr.diff()
    if bool((lengths < 1).any()):
        row = int((lengths < 1).nonzero()[0])
        raise ValueError(f"{name} does not rise at row {row}: {int(indptr[row])} then {int(indptr[row + 1])}")
    return lengths


def _own(table: Tensor) -> Tensor:
    return table.clone(memory_format=torch.contiguous_format)


def _refuse(name: str, values: Tensor, bad: Tensor, why: str) -> None:
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise ValueError(f"{name}[{index}] is {int(values[index])}, {why}")


class Attention(ABC):
    """Causal attention of a step's tokens over their own rows' pages, for all layers of one kind.

    ``layers`` holds each layer's keys [P, S, K, D] and values [P, S, K, E], usually views of one page-major
    block of all layers: any strides, but the same ones for all keys and for all values (where E is D, for both)
    and a contiguous last dimension.
    One object serves one step at a time: `plan` once, then `run` once per layer.
    """

    name: ClassVar[str]

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """What of ``spec`` this backend cannot do, in words; None: it can do all of it."""
        return None

    def __init__(self, spec: AttentionSpec, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """ValueError if the views do not fit ``spec`` or each other, or the backend `lacks` something."""
        if missing := self.lacks(spec):
            raise ValueError(f"{self.name} attention has no {missing}")
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
        self.spec = spec
        self.layers = tuple(layers)
        self.pages, self.page_size = first.shape[0], first.shape[1]
        self.dtype, self.device = first.dtype, first.device
        self._planned: Plan | None = None

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
        self._planned = None
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
        spec = self.spec
        tokens = q_THD.shape[0]
        if tokens < self._planned.tokens:
            raise ValueError(f"q has {tokens} tokens but {self._planned.tokens} are planned")
        self._check("q", q_THD, (tokens, spec.num_heads, spec.head_dim))
        self._check("k", k_TKD, (tokens, spec.num_kv_heads, spec.head_dim))
        self._check("v", v_TKE, (tokens, spec.num_kv_heads, spec.value_size))
        self._check("out", out_THE, (tokens, spec.num_heads, spec.value_size))
        if (sinks_H is not None) != spec.sinks:
            raise ValueError("sinks are missing" if spec.sinks else "sinks are given but not in the spec")
        if sinks_H is not None:
            self._check("sinks", sinks_H, (spec.num_heads,))
        self._run(self._planned, q_THD, k_TKD, v_TKE, layer, out_THE, sinks_H)

    def _check(self, name: str, operand: Tensor, shape: tuple[int, ...]) -> None:
        if operand.shape != shape:
            raise ValueError(f"{name} is {tuple(operand.shape)}, not {shape}")
        if operand.dtype != self.dtype or operand.device != self.device:
            raise ValueError(f"{name} is {operand.dtype} on {operand.device}, not {self.dtype} on {self.device}")
        if operand.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, strides are {operand.stride()}")

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
    if view.dtype not in DTYPES:
        raise ValueError(f"KV cache must be float32, bfloat16 or float16, not {view.dtype}")
    if view.stride(3) != 1:
        raise ValueError(f"KV cache: the last dimension must be contiguous, strides are {view.stride()}")
    if _layout(view) != _layout(first):
        raise ValueError(f"layer {number} has another layout: {_layout(view)}, not {_layout(first)}")


def _layout(view: Tensor) -> tuple[object, ...]:
    return tuple(view.shape), view.stride(), view.dtype, view.device
