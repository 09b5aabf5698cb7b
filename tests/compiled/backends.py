"""The attention backends that the conformance tests run on, and the answer they are compared with."""

import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled.attention.base import FP8, Attention, encode
from compiled.attention.cpu import CpuAttention
from compiled.attention.flashinfer import FlashInferAttention, Workspace
from compiled.attention.reference import ReferenceAttention
from compiled.device import Device
from compiled.gpu.cuda import Cuda
from compiled.gpu.recording import Recording
from tests.compiled.emulation import install
from tests.compiled.paged import LAYER, SCALES, Batch

EMULATED = "TEST_FLASHINFER_EMULATED"
"""In the environment: FlashInfer's kernels are replaced by `tests.compiled.emulation`, and no GPU is needed."""

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},  # weights are rounded to bfloat16 on a GPU
}


@dataclass(frozen=True)
class Backend:
    """``make`` is the class, with what it needs beside the contract's arguments. FlashInfer reads the pages that a row
    names to their end, so there the poison is finite, and large."""

    kind: type[Attention]
    make: Callable[..., Attention]
    device: Device
    poison: float = math.nan

    def attention(self, batch: Batch, cache: Tensor) -> Attention:
        return self.make(batch.spec, batch.views(cache), **batch.options)

    def batch(self, rows: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, **shape: Any) -> Batch:
        """A batch with this backend's poison."""
        return Batch(rows, heads, kv_heads, head_dim, poison=self.poison, **shape)

    def refuses(self, batch: Batch) -> bool:
        """Whether the backend lacks something; then it says so by name when it is made, too."""
        missing = self.kind.lacks(batch.spec, batch.dtype, batch.cache.dtype)
        if missing:
            with pytest.raises(ValueError, match=re.escape(f"{self.kind.name} attention has no {missing}")):
                self.attention(batch, batch.cache.to(self.device.torch))
        return missing is not None

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(out, cache afterwards), both on the CPU."""
        cache = batch.cache.to(self.device.torch, copy=True)
        attention = self.attention(batch, cache)
        attention.plan(*batch.tables)
        q, k, v = (operand.to(self.device.torch) for operand in batch.operands())
        out = q.new_full((*q.shape[:2], v.shape[2]), math.nan)
        sinks = None if batch.sinks is None else batch.sinks.to(self.device.torch)
        attention.run(q, k, v, LAYER, out, sinks)
        return out.cpu(), cache.cpu()


def missing_flashinfer() -> str | None:
    """Why FlashInfer cannot run here."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed (see test_flashinfer.py for its Python on the CPU)"
    if EMULATED not in os.environ and not torch.cuda.is_available():
        return "FlashInfer's kernels need a GPU"
    return None


BACKENDS = ["reference", "cpu", *([] if missing_flashinfer() else ["flashinfer"])]


@functools.cache
def backend_of(name: str) -> Backend:
    if name == "reference":
        return Backend(ReferenceAttention, ReferenceAttention, Recording())
    if name == "cpu":
        return Backend(CpuAttention, CpuAttention, Recording())
    if EMULATED in os.environ:
        install(pytest.MonkeyPatch())
        workspace = Workspace(Recording(), scratch_bytes=1 << 20)
    else:
        workspace = Workspace(Cuda())
    make = functools.partial(FlashInferAttention, workspace=workspace)
    return Backend(FlashInferAttention, make, workspace.device, poison=300.0)


def dense(batch: Batch) -> Tensor:
    """What the step's tokens get, in float64 from each row's keys and values by position: no pages, no backend."""
    return torch.cat([_dense(batch, row) for row in range(len(batch.rows))])


def _dense(batch: Batch, row: int) -> Tensor:
    tokens, positions = batch.rows[row]
    spec = batch.spec
    q_HTD = batch.queries[row][positions - tokens :].double().transpose(0, 1)
    k_HND, v_HNE = (
        _stored(batch, of_row[row], scale).transpose(0, 1).repeat_interleave(spec.num_heads // spec.num_kv_heads, 0)
        for of_row, scale in zip((batch.keys, batch.values), SCALES[LAYER], strict=True)
    )
    scores_HTN = spec.scale * q_HTD @ k_HND.transpose(1, 2)
    if spec.soft_cap is not None:
        scores_HTN = spec.soft_cap * (scores_HTN / spec.soft_cap).tanh()
    behind_TN = torch.arange(positions - tokens, positions)[:, None] - torch.arange(positions)
    seen_TN = (behind_TN >= 0) & (behind_TN < (spec.window or positions))
    scores_HTN = scores_HTN.masked_fill(~seen_TN, -math.inf)
    if batch.sinks is not None:
        sinks_HT1 = batch.sinks.double()[:, None, None].expand(-1, tokens, 1)
        scores_HTN = torch.cat([scores_HTN, sinks_HT1], -1)
    return (scores_HTN.softmax(-1)[..., :positions] @ v_HNE).transpose(0, 1)


def _stored(batch: Batch, operand: Tensor, scale: float) -> Tensor:
    """``operand`` as it comes back from the cache."""
    if not batch.float8:
        return operand.double()
    return encode(operand, FP8, scale).double() * scale


def assert_right(batch: Batch, backend: Backend) -> None:
    """The backend's answer is that of dense attention, padding is zero, and only the step's own slots are written. Or
    it refuses to be made."""
    if backend.refuses(batch):
        return
    out, cache = backend.run(batch)
    expected = dense(batch)
    real = len(expected)
    torch.testing.assert_close(out[:real].double(), expected, **TOLERANCE[batch.dtype])
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))
    after = batch.cache.clone()
    layer = batch.views(after)[LAYER]
    for row, (tokens, positions) in enumerate(batch.rows):
        page, slot = (places[positions - tokens :] for places in batch.slots(row))
        for written, of_row, scale in zip(layer, (batch.keys, batch.values), SCALES[LAYER], strict=True):
            written[page, slot] = encode(of_row[row][positions - tokens :], written.dtype, scale)
    assert torch.equal(cache.view(torch.uint8), after.view(torch.uint8))
