"""FlashInfer's paged kernels behind the contract: its prefill and decode wrappers, planned once a step on the host.

Uses what versions 0.6.18 to 0.7.4 have in common: the fa2 kernels in which a decoding row is a prefill of one token
(so one compiled module serves both), by keyword only, and never anything private. Plans on CPU tensors, so nothing
waits for the device. Imports FlashInfer at the first plan: it is no dependency.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from compiled.attention.base import FP8, Attention, AttentionSpec
from compiled.attention.staged import Stage, Staged
from compiled.attention.tables import Fixed, Plan
from compiled.attention.write import write
from compiled.device import Device

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
SCRATCH_BYTES = 512 << 20
"""For the partial results of rows that are split: with 32 heads of 128, 70 MB for any prefill, and 135 MB for a graph
of 512 rows before FlashInfer 0.7.1."""
_SCHEDULE_BYTES = 1 << 20
"""A decoding step's schedule: some twenty bytes a row and a block of the GPU. A wrapper's own is 8 MiB, and there is
one for each size of graph and kind of layer."""

_Cache = tuple[Tensor, Tensor]


class Workspace:
    """What the objects of all kinds of layers share, their work being on one stream: scratch and a step's tables."""

    def __init__(self, device: Device, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.device = device
        self.scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=device.torch)
        self._eager = Stage(device)
        self._fixed: dict[tuple[int, int], Stage] = {}

    def stage(self, fixed: Fixed | None) -> Stage:
        """The tables of eager steps, or those of the graphs for so many rows."""
        if fixed is None:
            return self._eager
        rows, indices = key = (fixed.rows, fixed.indices)
        if key not in self._fixed:
            self._fixed[key] = Stage(self.device, tokens=rows, rows=rows, indices=indices)
        return self._fixed[key]


@dataclass(frozen=True, slots=True)
class _Constants:
    """What every plan of a kind of layer is told."""

    head_dim: int
    others: dict[str, Any]

    @classmethod
    def of(cls, spec: AttentionSpec, page_size: int, dtype: torch.dtype, cache: torch.dtype) -> Self:
        others = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": page_size,
            "sm_scale": spec.scale,
            "window_left": -1 if spec.window is None else spec.window - 1,  # it does not count the token itself
            "logits_soft_cap": spec.soft_cap or 0.0,
            "q_data_type": dtype,
            "kv_data_type": cache,
        }
        return cls(spec.head_dim, others)


class _Wrappers(Protocol):
    """FlashInfer's wrappers for one kind of step."""

    def plan(self, plan: Plan, staged: Staged) -> None: ...

    def run(self, q_THD: Tensor, cache: _Cache, out_THD: Tensor, scales: dict[str, float]) -> None:
        """The planned tokens only."""


class _Eager:
    """Rows of one token that come first are decoded, all others prefilled: two runs into slices of one output.

    A row of one token behind a longer one is right too, but takes a prefill's tiles: put such rows first.
    """

    def __init__(self, workspace: Workspace, constants: _Constants) -> None:
        # Optional: for machines with a GPU.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._decode = _decoder(workspace.scratch)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace.scratch, kv_layout="NHD", backend="fa2")
        self._constants = constants
        self._planned = workspace.device.event()
        self._decoding = self._tokens = 0

    def plan(self, plan: Plan, staged: Staged) -> None:
        self._planned.synchronize()  # the wrappers' own staging memory is being copied until then
        lengths = np.diff(plan.qo_indptr.numpy())
        rows = plan.rows if plan.tokens == plan.rows else int((lengths > 1).argmax())
        self._decoding, self._tokens = rows, plan.tokens
        pages = int(plan.kv_indptr[rows])
        if rows:
            self._decode.plan(
                indptr=plan.kv_indptr[: rows + 1],
                indices=staged.kv_indices[:pages],
                last_page_len=plan.kv_last_page_len[:rows],
                seq_lens=plan.kv_lens[:rows],
                head_dim=self._constants.head_dim,
                **self._constants.others,
            )
        if rows < plan.rows:
            self._prefill.plan(
                qo_indptr=plan.qo_indptr[rows:] - rows,
                paged_kv_indptr=plan.kv_indptr[rows:] - pages,
                paged_kv_indices=staged.kv_indices[pages:],
                paged_kv_last_page_len=plan.kv_last_page_len[rows:],
                seq_lens=plan.kv_lens[rows:],
                max_token_per_sequence=int(lengths.max()),
                causal=True,
                head_dim_qk=self._constants.head_dim,
                **self._constants.others,
            )
        self._planned.record()

    def run(self, q_THD: Tensor, cache: _Cache, out_THD: Tensor, scales: dict[str, float]) -> None:
        rows, tokens = self._decoding, self._tokens
        if rows:
            self._decode.run(q_THD[:rows], cache, out=out_THD[:rows], **scales)
        if rows < tokens:
            self._prefill.run(q_THD[rows:tokens], cache, out=out_THD[rows:tokens], **scales)


class _Captured:
    """The decode wrapper for a graph of exactly so many rows, which reads the tables where they always lie."""

    def __init__(self, workspace: Workspace, constants: _Constants, rows: int) -> None:
        self._workspace, self._constants, self._rows = workspace, constants, rows
        self._planned = workspace.device.event()
        self._decode: Any = None

    def plan(self, plan: Plan, staged: Staged) -> None:
        # Optional: for machines with a GPU.
        from flashinfer import fast_decode_plan

        self._planned.synchronize()
        tables = {
            "indptr": plan.kv_indptr,
            "indices": staged.kv_indices,
            "last_page_len": plan.kv_last_page_len,
            "head_dim": self._constants.head_dim,
            **self._constants.others,
        }
        if self._decode is None:
            decode = _decoder(
                self._workspace.scratch,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=staged.kv_indptr,
                paged_kv_indices_buffer=staged.room,
                paged_kv_last_page_len_buffer=staged.kv_last_page_len,
            )
            schedule = torch.zeros(_SCHEDULE_BYTES, dtype=torch.uint8, device=self._workspace.scratch.device)
            decode.reset_workspace_buffer(self._workspace.scratch, schedule)
            decode.plan(**tables)
            self._decode = decode
        else:
            fast_decode_plan(self._decode, **tables)  # copies no tables: they are staged in their place
        self._planned.record()

    def run(self, q_THD: Tensor, cache: _Cache, out_THD: Tensor, scales: dict[str, float]) -> None:
        self._decode.run(q_THD[: self._rows], cache, out=out_THD[: self._rows], **scales)


def _decoder(scratch: Tensor, **graph: Any) -> Any:
    # Optional: for machines with a GPU.
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    options = {"kv_layout": "NHD", "backend": "fa2", "use_tensor_cores": True}
    return BatchDecodeWithPagedKVCacheWrapper(scratch, **options, **graph)


class FlashInferAttention(Attention):
    """Pages that a row names are read whole, so even what a window hides from it must be finite: zero the cache."""

    name = "flashinfer"

    @classmethod
    def lacks(
        cls, spec: AttentionSpec, dtype: torch.dtype | None = None, cache: torch.dtype | None = None
    ) -> str | None:
        if spec.sinks:
            return "sinks (the wrappers take them, and the fa2 kernels ignore them)"
        if spec.value_size != spec.head_dim:
            return f"values of {spec.value_size} beside keys of {spec.head_dim}"
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim} (only {', '.join(map(str, HEAD_DIMS))})"
        if not spec.scale > 0:
            return f"scale {spec.scale} (it must be positive)"
        if dtype is not None and dtype not in DTYPES:
            return f"operands of {dtype} (only {' and '.join(map(str, DTYPES))})"
        if cache is not None and cache not in (FP8, dtype):
            return f"KV cache of {cache} for operands of {dtype}"
        return None

    def __init__(
        self,
        spec: AttentionSpec,
        layers: Sequence[tuple[Tensor, Tensor]],
        workspace: Workspace,
        *,
        dtype: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        """One ``workspace`` for all objects that a step runs, which `take` one and the same plan."""
        super().__init__(spec, layers, dtype=dtype, scales=scales)
        if self.device != workspace.scratch.device:
            raise ValueError(f"KV cache is on {self.device}, the workspace on {workspace.scratch.device}")
        self._workspace = workspace
        self._constants = _Constants.of(spec, self.page_size, self.dtype, self.cache_dtype)
        self._wrappers: list[_Wrappers] = []

    def _again(self) -> Self:
        scales = self.scales if self.cache_dtype == FP8 else None
        return type(self)(self.spec, self.layers, self._workspace, dtype=self.dtype, scales=scales)

    def _hold(self, fixed: Fixed, plan: Plan) -> Plan:
        return plan  # what runs read is staged

    def _prepare(self, plan: Plan) -> None:
        if not self._wrappers:
            self._wrappers = self._make_wrappers()
        self._wrappers.reverse()  # those of the step before may still be in use
        self._stage = self._workspace.stage(self._fixed)
        self._staged = self._stage.put(plan, self.page_size)
        self._wrappers[0].plan(plan, self._staged)

    def _make_wrappers(self) -> list[_Wrappers]:
        if self._fixed is None:
            return [_Eager(self._workspace, self._constants) for _ in range(2)]
        return [_Captured(self._workspace, self._constants, self._fixed.rows)]

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
        if not self._stage.holds(plan):
            raise ValueError("another object of the same workspace was planned differently since")
        tokens, dense_THE = plan.tokens, out_THE.contiguous()  # the kernels know no strides of it
        scales = dict(zip(("k_scale", "v_scale"), self.scales[layer], strict=True)) if self.cache_dtype == FP8 else {}
        operands, places = (k_TKD[:tokens], v_TKE[:tokens]), (self._staged.pages, self._staged.slots)
        write(operands, self.layers[layer], *places, self.scales[layer])
        self._wrappers[0].run(q_THD, self.layers[layer], dense_THE, scales)
        if dense_THE is not out_THE:
            out_THE.copy_(dense_THE)
        out_THE[tokens:].zero_()
