"""FlashInfer without its kernels: its own Python, over a module that computes on the CPU what the compiled one would.

`install` puts it where FlashInfer loads what it has compiled. The emulation is strict where the kernels trust their
caller: they take the schedule from the workspace and the pages from the buffers, and here the two must agree.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

LOADED: "dict[str, Module]" = {}
"""Modules by name."""
NAMES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
CAUSAL = 1


@dataclass(frozen=True)
class Schedule:
    """What `Module.plan` leaves in the int workspace."""

    number: int
    qo_indptr: list[int]
    kv_indptr: list[int]
    kv_lens: list[int]

    def write(self, pinned: Tensor, workspace: Tensor) -> None:
        numbers = [self.number, len(self.kv_lens), *self.qo_indptr, *self.kv_indptr, *self.kv_lens]
        assert pinned.shape == workspace.shape, "the pinned and the device's int workspace differ in size"
        assert 4 * len(numbers) <= workspace.numel(), "Buffer overflow when allocating memory for the schedule"
        pinned[: 4 * len(numbers)].view(torch.int32).copy_(torch.tensor(numbers, dtype=torch.int32))
        workspace.copy_(pinned)

    @classmethod
    def read(cls, workspace: Tensor) -> "Schedule":
        number, rows, *rest = workspace.view(torch.int32).tolist()
        cuts = [0, rows + 1, 2 * rows + 2, 3 * rows + 2]
        return cls(number, *(rest[begin:end] for begin, end in pairwise(cuts)))


class Module:
    """One compiled module of fa2 paged attention. ``name`` is what FlashInfer calls it, and says what it can do."""

    numbers = count(1)
    ragged_run = None  # looked up, never called

    def __init__(self, name: str) -> None:
        found = re.fullmatch(
            r"batch_prefill_with_kv_cache_dtype_q_(\w+)_dtype_kv_(\w+)_dtype_o_(\w+)_dtype_idx_i32_head_dim_qk_(\d+)"
            r"_head_dim_vo_(\d+)_posenc_0_use_swa_(\w+)_use_logits_cap_(\w+)_f16qk_False\w*",
            name,
        )
        assert found, f"no module of paged attention with int32 tables: {name}"
        q, kv, out, keys, values, window, cap = found.groups()
        self.name = name
        self.dtypes = tuple(NAMES[which] for which in (q, kv, out))
        self.head_dims = int(keys), int(values)
        self.window, self.cap = window == "True", cap == "True"
        self.planned: list[Schedule] = []
        self.ran_at: list[tuple[int, ...]] = []
        """Addresses of the int workspace and the three tables, by run."""

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_rows: int,
        rows: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        graph: bool,
        key_dim: int,
        value_dim: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        *others: Any,
    ) -> list[int]:
        for table, size in ((qo_indptr, rows + 1), (kv_indptr, rows + 1), (kv_lens, rows)):
            assert table.dtype == torch.int32 and table.device.type == "cpu" and table.is_contiguous()
            assert table.shape == (size,), f"a table of {tuple(table.shape)} for {rows} rows"
        assert int(qo_indptr[-1]) == total_rows and heads % kv_heads == 0
        assert (key_dim, value_dim) == self.head_dims and (window_left >= 0) == self.window
        assert fixed_split_size == -1 and not disable_split_kv
        schedule = Schedule(next(self.numbers), qo_indptr.tolist(), kv_indptr.tolist(), kv_lens.tolist())
        self.planned.append(schedule)
        schedule.write(pinned, int_workspace)
        # A graph's replay has only what was baked in at its capture: sizes, but not which plan it was.
        return [0 if graph else schedule.number, rows, total_rows, heads, kv_heads, page_size, window_left]

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *others: Any,
    ) -> None:
        # Masks, slopes and scales of blocks are tensors that are not there; then five numbers.
        *absent, soft_cap, sm_scale, _, _, _ = others
        assert len(absent) == 8 and [one is not None for one in absent].count(True) <= 1, others
        schedule = Schedule.read(int_workspace)
        number, rows, total_rows, heads, kv_heads, page_size, planned_window = plan_info
        assert number in (0, schedule.number), "run with the schedule of another plan"
        assert layout == 0 and lse is None and planned_window == window_left and (soft_cap > 0) == self.cap
        self._check(q, keys, values, out, (total_rows, heads), (page_size, kv_heads))
        if qo_indptr.tolist() != schedule.qo_indptr or kv_indptr.tolist() != schedule.kv_indptr:
            raise AssertionError("the tables are not those of the plan")
        last, lengths = kv_last_page_len.tolist(), []
        for row, (begin, end) in enumerate(pairwise(schedule.kv_indptr)):
            lengths.append((end - begin - 1) * page_size + last[row])
        assert lengths == schedule.kv_lens, "the last page lengths are not those of the plan"
        assert len(lengths) == rows
        tables = (kv_indptr, kv_indices, kv_last_page_len)
        self.ran_at.append(tuple(tensor.data_ptr() for tensor in (int_workspace, *tables)))
        formula = (mask_mode == CAUSAL, window_left, soft_cap, sm_scale)
        for row in range(rows):
            tokens = slice(*schedule.qo_indptr[row : row + 2])
            pages = kv_indices[slice(*schedule.kv_indptr[row : row + 2])].tolist()
            assert all(0 <= page < len(keys) for page in pages), "a page outside of the cache"
            k_NKD, v_NKD = (cache[pages].flatten(0, 1)[: lengths[row]].float() for cache in (keys, values))
            out[tokens] = _attend(q[tokens].float(), k_NKD, v_NKD, *formula).to(out.dtype)

    def _check(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, q_sizes: tuple[int, int], sizes: tuple[int, int]
    ) -> None:
        assert (q.dtype, keys.dtype, out.dtype) == self.dtypes and values.dtype == keys.dtype
        assert q.shape == (*q_sizes, self.head_dims[0]) and q.stride(-1) == 1
        assert out.shape == (*q_sizes, self.head_dims[1]) and out.is_contiguous(), "the kernels know no strides of out"
        assert keys.shape[1:] == (*sizes, self.head_dims[0]) and values.shape[1:] == (*sizes, self.head_dims[1])
        assert keys.stride() == values.stride(), "another module, compiled at the first run"
        for tensor in (q, keys, values, out):
            assert tensor.data_ptr() % 16 == 0, "vectors of 16 bytes are loaded"


def _attend(
    q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, causal: bool, window_left: int, soft_cap: float, scale: float
) -> Tensor:
    group = q_THD.shape[1] // k_NKD.shape[1]
    scores_HTN = torch.einsum("thd,nhd->htn", q_THD, k_NKD.repeat_interleave(group, 1)) * scale
    if soft_cap > 0:
        scores_HTN = soft_cap * torch.tanh(scores_HTN / soft_cap)
    tokens, length = scores_HTN.shape[1:]
    behind_TN = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
    hidden_TN = (behind_TN < 0) if causal else torch.zeros_like(behind_TN, dtype=torch.bool)
    if window_left >= 0:
        hidden_TN |= behind_TN > window_left
    weights_HTN = scores_HTN.masked_fill(hidden_TN, float("-inf")).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights_HTN, v_NKD.repeat_interleave(group, 1))


def install(patch: pytest.MonkeyPatch) -> None:
    """FlashInfer loads `Module` from here on, and keeps them in `LOADED`."""
    import flashinfer
    from flashinfer.jit import core

    def load(spec: Any) -> Module:
        return LOADED.setdefault(spec.name, Module(spec.name))

    def unpinned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, pin_memory=False, **options: empty(*args, **options)

    patch.setattr(core.JitSpecNvcc, "build_and_load", load)
    patch.setattr(torch, "empty", unpinned(torch.empty))
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for module in (flashinfer.utils, flashinfer.decode, flashinfer.prefill):
        if hasattr(module, "get_compute_capability"):
            patch.setattr(module, "get_compute_capability", lambda device: (9, 0))
