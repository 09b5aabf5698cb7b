"""Executes steps on an accelerator, one of them in flight while the next one is prepared.

```
submit(N + 1)   batch → one copy to the device → ids of pending rows are taken from N's tokens there → plan, launch
                → sample → copy the tokens back → return
wait of N       the copy's event → StepResult
```

A step with grammars is not sampled at once, because its bitmask may hang on N's tokens: its forward pass runs while
those travel and are taken in, and it is sampled when N + 2 is submitted or its own tokens are waited for.

Nothing but `wait` and the end of a profile waits for the device, which does what it is given in order: a step may
overwrite what the one before only reads. All calls must come from one thread.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from compiled import batch as batches
from compiled import rehearsal, selfcheck
from compiled.answers import answer, logit_rows
from compiled.attention.base import AttentionSpec
from compiled.ceilings import measure_ceilings, plain_read
from compiled.device import Device
from compiled.gpu.meter import Meter
from compiled.gpu.passes import STAGES, Passes, Way
from compiled.gpu.sampler import DeviceSampler, Group, Unseen, stage
from compiled.gpu.staging import Arrival, Inputs, Outputs, Parcel
from compiled.kv_store import KVStore
from compiled.logprobs import tell
from compiled.profiling import Recorder
from compiled.program import SMALLEST
from compiled.step import KVMemory, KVSpec, Logprob, ModelSpec, Row, Step, StepResult
from compiled.timeline import Measure, PieceAbout, Window

_LOGPROBS_AT_ONCE = 64
_ANSWER = attrgetter("request", "index")


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The step before: where each answer's token is among ``tokens``, which are on the device. None: there are several,
    and which of them counts is not known yet."""

    places: dict[tuple[int, int], int | None]
    tokens: Tensor

    def place(self, row: Row) -> int:
        """Where the token is that ``row`` waits for. ValueError: no token, or no certain one, is in flight for it."""
        found = self.places.get(_ANSWER(row))
        if found is None:
            raise ValueError(f"request {row.request}, answer {row.index}: the step before samples no token for it")
        return found


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step on its way to the device. ``order[i]`` is the number in ``step`` of row i of ``batch``."""

    step: Step
    order: Sequence[int]
    batch: batches.Batch
    tokens: int
    unseen: Sequence[Unseen]
    sources: np.ndarray
    targets: np.ndarray

    @property
    def rows(self) -> int:
        """How many logit rows."""
        return sum(self.batch.samples) + len(self.batch.targets)

    @property
    def decoding(self) -> bool:
        return self.tokens == self.rows == sum(self.batch.samples) == len(self.order)


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step whose forward pass was launched, and what is needed to sample it. ``asked`` are logit rows whose
    log-probabilities are wanted, with so many likeliest tokens; ``numbers`` are these rows' and the targets' among
    ``arrays``."""

    prepared: _Prepared
    way: Way
    recorder: Recorder | None
    logits_RV: Tensor
    arrays: Sequence[Tensor]
    groups: Sequence[Group]
    asked: Sequence[tuple[int, int]]
    numbers: tuple[int, int]


class Flight:
    """The handle of a step that was launched. ``arrival`` is there once it was sampled, or ``error``."""

    def __init__(self, runner: "GpuRunner", computed: _Computed, started: float) -> None:
        self._runner = runner
        self.computed = computed
        self._started = started
        self.arrival: Arrival | None = None
        self.error: Exception | None = None

    def wait(self) -> StepResult:
        """Once."""
        if self.arrival is None:
            self._runner._sample_late()
        if self.error is not None:
            raise self.error
        assert self.arrival is not None
        with torch.inference_mode():
            told = self.arrival.wait()
        return self._runner._land(self.computed.prepared, told, self._started)


class GpuRunner:
    """See `compiled.step.Runner`. ``depth`` is 2. ``passes`` makes what runs over a store."""

    depth = 2

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        passes: Callable[[KVStore], Passes],
        layers: Sequence[AttentionSpec] = (),
        about: Sequence[PieceAbout] = (),
    ) -> None:
        self.model = model
        self.device = device
        self._make_passes = passes
        self._layers, self._about = layers, about
        self._recorder: Recorder | None = None
        self._sampler = DeviceSampler(device.torch)
        self._inputs, self._masks, self._outputs = Inputs(device), Inputs(device), Outputs(device)
        self._before = _Sampled({}, torch.zeros(0, dtype=torch.int64, device=device.torch))
        self._late: Flight | None = None
        self._meter = Meter()
        self._landed = 0.0

    def allocate(self, store: KVStore) -> None:
        """Use ``store`` from now on; no step is in flight."""
        self.kv: KVSpec = store.spec
        self._store = store
        with torch.inference_mode():
            self.passes = self._make_passes(store)
        self._way = self._measured = Way(self.passes, self._inputs.send, self._bits, self._sampler.sample)

    def note(self, **facts: float) -> None:
        """Add to what `statistics` tells."""
        self._meter.note(**facts)

    def submit(self, step: Step) -> Flight:
        self._sample_late()
        recorder = self._recorder
        way = self._measured if recorder is not None and recorder.begin(step) else self._way
        started = time.perf_counter()
        with torch.inference_mode():
            flight = Flight(self, self._launch(step, way, recorder), started)
        self._meter.launched(step, time.perf_counter() - started)
        if step.masks is None:
            self._sample(flight)
        else:
            self._late = flight
        return flight

    def profile(self, measure: Measure) -> None:
        """See `compiled.timeline.Profiled`. Steps that are measured replay no graph."""
        self.profiled(stop=True)
        item_bytes = self._store.layers[0][0].itemsize
        self._recorder = Recorder(
            measure, self.passes.forward, STAGES, self._about, self._layers, item_bytes, device=self.device.torch
        )
        self._measured = self._way.measured(self._recorder, self.device)

    def profiled(self, *, stop: bool = False) -> Window | None:
        """See `compiled.timeline.Profiled`. Waits for the steps in flight, of which the window may be."""
        recorder = self._recorder
        if recorder is None or not (stop or recorder.done):
            return None
        self._recorder, self._measured = None, self._way
        self._synchronize()
        return recorder.window()

    def ceilings(self) -> dict[str, float]:
        """See `compiled.timeline.Profiled`. Waits for the steps in flight."""
        self._synchronize()
        return measure_ceilings(self.model.dtype, self.device.torch)

    def plain_read(self, size: int) -> Callable[[], float]:
        """See `compiled.timeline.Profiled`."""
        return plain_read(size, self.device.torch)

    def _synchronize(self) -> None:
        with torch.inference_mode():
            self.device.synchronize()

    def _launch(self, step: Step, way: Way, recorder: Recorder | None) -> _Computed:
        """Give the forward pass of ``step`` to the device, and all that sampling needs but for the bitmask."""
        prepared = self._prepare(step, way)
        batch, parcel = prepared.batch, Parcel()
        groups = stage(batch.sampling, self.model.vocab_size, parcel, prepared.unseen)
        asked = [(i, top) for i, top in enumerate(batch.tops) if top is not None]
        numbers = parcel.add(np.array([i for i, _ in asked], np.int64)), parcel.add(batch.targets.numpy())
        logits_RV, arrays = self._forward(prepared, parcel, way)
        return _Computed(prepared, way, recorder, logits_RV, arrays, groups, asked, numbers)

    def _sample_late(self) -> None:
        """Sample the step that waits for its bitmask, if any. What that raises is told to who waits for its tokens; a
        step behind it computes garbage in their place that nobody reads."""
        flight, self._late = self._late, None
        if flight is None:
            return
        try:
            self._sample(flight)
        except Exception as error:
            flight.error, prepared = error, flight.computed.prepared
            nothing = torch.zeros(1 + prepared.rows, dtype=torch.int64, device=self.device.torch)
            self._before = _Sampled(self._places(prepared), nothing)

    @torch.inference_mode()
    def _sample(self, flight: Flight) -> None:
        """Give the device all that is left of a step to do."""
        started = time.perf_counter()
        computed, way = flight.computed, flight.computed.way
        prepared, arrays = computed.prepared, computed.arrays
        sampled = sum(prepared.batch.samples)
        bits, waited = way.masks(prepared.step)
        begun = time.perf_counter()
        found = way.sample(computed.logits_RV[:sampled], computed.groups, arrays, bits, self._before.tokens)
        sampling = time.perf_counter() - begun
        rows_N, targets = (arrays[number] for number in computed.numbers)
        tokens_R = torch.cat([found[:sampled], targets])
        told = _measure(way.logprobs, computed.logits_RV, tokens_R, rows_N, computed.asked) if computed.asked else []
        flight.arrival = self._outputs.fetch([found, *told])
        self._before = _Sampled(self._places(prepared), found)
        if computed.recorder is not None:
            computed.recorder.end()
        self._meter.sampled(time.perf_counter() - started - waited, sampling)

    def _prepare(self, step: Step, way: Way) -> _Prepared:
        lengths = list(map(len, map(attrgetter("tokens"), step.rows)))
        order: Sequence[int] = range(len(lengths))
        if lengths != sorted(lengths, key=lambda length: length > 1):
            # Those of one token come first, as attention likes it: they are decoded, the others prefilled.
            order = sorted(order, key=lambda i: lengths[i] > 1)
        rows = [step.rows[i] for i in order]
        pending = [i for i, row in enumerate(rows) if row.pending]
        sources = [self._before.place(rows[i]) for i in pending]
        hidden = [(i, source) for i, source in zip(pending, sources, strict=True) if rows[i].history]
        for i, _ in hidden:
            rows[i] = replace(rows[i], history=rows[i].history[:-1])
        batch = way.batch(replace(step, rows=tuple(rows)), self.kv.page_size, SMALLEST)
        ends, firsts = batch.qo_indptr[1:].tolist(), list(accumulate(batch.samples, initial=0))
        return _Prepared(
            step,
            order,
            batch,
            ends[-1],
            [Unseen(rows[i], rows[i].start + len(rows[i].tokens), firsts[i], source) for i, source in hidden],
            np.array(sources, np.int64),
            np.array([ends[i] - 1 for i in pending], np.int64),
        )

    def _forward(self, prepared: _Prepared, parcel: Parcel, way: Way) -> tuple[Tensor, list[Tensor]]:
        """Logits ``[R, V]``, and ``parcel`` on the device."""
        batch, tokens, rows = prepared.batch, prepared.tokens, prepared.rows
        for source, target in prepared.step.copies:
            self._store.copy(source, target)
        place = way.passes.place(tokens, rows, decoding=prepared.decoding)
        padded = len(place.ids_T)
        inputs = np.zeros(2 * padded + len(place.rows_R), np.int64)
        inputs[:tokens] = batch.ids_T[:tokens]
        inputs[padded : padded + tokens] = batch.positions_T[:tokens]
        inputs[2 * padded : 2 * padded + rows] = batch.rows_R[:rows]
        ours, sources, targets = parcel.add(inputs), parcel.add(prepared.sources), parcel.add(prepared.targets)
        arrays = way.send(parcel)
        place.inputs.copy_(arrays[ours])
        if len(prepared.sources):
            place.ids_T.index_copy_(0, arrays[targets], self._before.tokens.index_select(0, arrays[sources]))
        tables = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
        return way.passes.run(place, tables)[:rows, : self.model.vocab_size], arrays

    def _bits(self, step: Step) -> tuple[Tensor | None, float]:
        """The bitmask on the device, once it is made, and for how many seconds that was waited for."""
        if step.masks is None:
            return None, 0.0
        started = time.perf_counter()
        made = np.frombuffer(step.masks.wait(), np.uint8)
        waited = time.perf_counter() - started
        parcel = Parcel()
        number = parcel.add(made.reshape(-1, 4 * step.masks.words))
        return self._masks.send(parcel)[number], waited

    def _places(self, prepared: _Prepared) -> dict[tuple[int, int], int | None]:
        step, samples = prepared.step, prepared.batch.samples
        firsts = accumulate(samples, initial=0)
        return {
            _ANSWER(step.rows[i]): first if count == 1 else None
            for i, first, count in zip(prepared.order, firsts, samples, strict=False)
            if count
        }

    def _land(self, prepared: _Prepared, told: Sequence[Tensor], started: float) -> StepResult:
        """The result of a step whose tokens are on the host."""
        now = time.perf_counter()
        # The device was busy with the step before until that landed.
        seconds, self._landed = now - max(started, self._landed), now
        step, batch = prepared.step, prepared.batch
        *tokens, broken = told[0].tolist()
        logprobs = _told(told[1:], batch.tops) if told[1:] else ()
        result = answer(step.number, batch, prepared.order, tokens, logprobs, seconds)
        self._meter.landed(step, seconds, broken, time.perf_counter() - now)
        return result

    def logits(self, step: Step) -> Tensor:
        """Logits ``[R, V]`` of the rows that sample, then of those that score, without sampling and on the host: for
        tests and self-checks."""
        with torch.inference_mode():
            prepared = self._prepare(step, self._way)
            logits_RV, _ = self._forward(prepared, Parcel(), self._way)
            return logits_RV.cpu()[logit_rows(prepared.batch, prepared.order)]

    def check(self, expected: selfcheck.Expected) -> selfcheck.Check:
        """Raises LoadError where the logits are not the expected ones."""
        return selfcheck.check(expected, self.kv.page_size, self.logits)

    def kv_memory(self) -> KVMemory | None:
        return self._store.memory()

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages that nobody owns with NaN: a read of what was not written since shows in ``broken_rows``."""
        self._store.poison(pages)

    def warmup(self) -> None:
        """The few graphs to start with, and every kind of sampling. Nothing is kept of what it counted."""
        self._meter.prepare()
        with torch.inference_mode():
            self.passes.warmup()
        for step in rehearsal.warm_up(self.kv.page_size):
            self.submit(step).wait()
        self._meter.serve()

    def capture_next(self) -> bool:
        """Spend idle time on a graph that steps have missed; False: none is."""
        return self.passes.capture_next()

    def statistics(self) -> dict[str, float]:
        kv_bytes = self.kv.pages * self.kv.page_bytes
        return self._meter.statistics() | self.passes.statistics() | {"kv_bytes": kv_bytes}


def _measure(
    measure: Callable[..., Sequence[Tensor]],
    logits_RV: Tensor,
    tokens_R: Tensor,
    rows_N: Tensor,
    asked: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """Pairs of ``measure``, which is `compiled.logprobs.measure`, for the logit rows ``rows_N``; ``asked`` are these
    rows' numbers, and how many likeliest tokens are reported of each."""
    pairs: list[Tensor] = []
    for start, few_N in zip(range(0, len(asked), _LOGPROBS_AT_ONCE), rows_N.split(_LOGPROBS_AT_ONCE), strict=True):
        most = max(top for _, top in asked[start : start + _LOGPROBS_AT_ONCE])
        pairs += measure(logits_RV.index_select(0, few_N).float(), tokens_R.index_select(0, few_N)[:, None], most)
    return pairs


def _told(told: Sequence[Tensor], tops: Sequence[int | None]) -> list[Logprob | None]:
    """For each logit row what is reported of it; ``told`` are pairs of `compiled.logprobs.measure`."""
    asked = [(i, top) for i, top in enumerate(tops) if top is not None]
    found: list[Logprob | None] = [None] * len(tops)
    for number, (ids, values) in enumerate(zip(told[::2], told[1::2], strict=True)):
        few = asked[number * _LOGPROBS_AT_ONCE :][:_LOGPROBS_AT_ONCE]
        for (i, _), logprob in zip(few, tell(ids, values, [top for _, top in few]), strict=True):
            found[i] = logprob
    return found
