"""Forward passes over one KV store, and all else that a step on an accelerator goes through: functions that a profile
replaces by ones which measure them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compiled import batch as batches
from compiled.attention.layers import ModelAttention
from compiled.attention.tables import Tables
from compiled.device import Device
from compiled.gpu.graphs import Place
from compiled.logprobs import measure
from compiled.profiling import Recorder
from compiled.program import SMALLEST, Forward

STAGES = "batch", "send", "plan", "masks", "sample", "logprobs"


class Passes(Protocol):
    """Passes of ``forward`` with ``attention``: `compiled.gpu.graphs.Graphs`, or `Ungraphed`."""

    @property
    def forward(self) -> Forward: ...
    @property
    def attention(self) -> ModelAttention: ...
    def place(self, tokens: int, rows: int, *, decoding: bool) -> Place: ...
    def run(self, place: Place, tables: Tables) -> Tensor: ...
    def warmup(self) -> None: ...
    def capture_next(self) -> bool: ...
    def statistics(self) -> dict[str, float]: ...


class Ungraphed:
    """Passes that are launched call by call."""

    def __init__(
        self,
        forward: Forward,
        attention: ModelAttention,
        device: Device,
        plan: Callable[..., None] | None = None,
    ) -> None:
        self.forward = forward
        self.attention = attention
        self._device = device
        self._plan = attention.plan if plan is None else plan

    def place(self, tokens: int, rows: int, *, decoding: bool) -> Place:
        tokens, rows = max(tokens, SMALLEST), max(rows, SMALLEST)
        inputs = torch.empty(2 * tokens + rows, dtype=torch.int64, device=self._device.torch)
        return Place(None, inputs, *inputs.split([tokens, tokens, rows]))

    def run(self, place: Place, tables: Tables) -> Tensor:
        self._plan(*tables)
        return self.forward(place.ids_T, place.positions_T, place.rows_R, self.attention)

    def warmup(self) -> None:
        """Nothing is captured."""

    def capture_next(self) -> bool:
        return False

    def statistics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class Way:
    """Of a step to its tokens, in order: `passes` plans and computes between ``send`` and ``masks``."""

    passes: Passes
    send: Callable[..., list[Tensor]]
    masks: Callable[..., tuple[Tensor | None, float]]
    sample: Callable[..., Tensor]
    batch: Callable[..., batches.Batch] = batches.build
    logprobs: Callable[..., Sequence[Tensor]] = measure

    def measured(self, recorder: Recorder, device: Device) -> "Way":
        """The same, seen by ``recorder`` call by call: a graph that is replayed cannot be looked into, so none is."""
        attention = self.passes.attention
        passes = Ungraphed(recorder.forward(), attention, device, recorder.host("plan", attention.plan))
        return Way(passes, **{name: recorder.host(name, getattr(self, name)) for name in STAGES if name != "plan"})
