"""What each call of a step takes: puts itself between the calls of a forward pass, and is not there otherwise.

A runner that is not measured runs its own list of calls, the very same object as ever. One that is runs a second
list, whose functions take the time around those of the first: two readings of a clock a call. With a trace, torch's
profiler runs beside, every call is a ``record_function`` named after its place and bucket, and every kernel that
Inductor wrote is one named as in its code.

On CUDA the clock is the stream's: an event before and after each call, read when the window is over, so that nothing
is waited for in between. What is measured there of the host's work is the time for which it keeps the stream idle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from compiled.attention.base import AttentionSpec
from compiled.clock import clock_of
from compiled.linear import op
from compiled.program import Entry, Forward, PlannedAttention, Program
from compiled.recipe import Run
from compiled.step import Step
from compiled.timeline import Measure, MeasuredStep, PieceAbout, Place, Span, Window
from compiled.work import attention_work

_Result = TypeVar("_Result")
_NOT_KNOWN: tuple[int | None, int | None] = None, None


@dataclass
class _Seen:
    """One step: ``(start, tokens)`` of its rows, moments at its ends and before and after each call, T and R as they
    were padded. Not the step itself, whose rows hold whole sequences."""

    number: int
    lengths: list[tuple[int, int]]
    began: Any
    ended: Any = None
    marks: list[tuple[int, Any, Any]] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0


class Recorder:
    """Measures the next steps of a runner.

    The runner tells `begin` of every step, and where that says so goes through what `forward` and `host` made of its
    functions; then it tells `end`, or nothing where the step fails. A step ends when all of it is launched, so none
    begins before the last one has ended, however many are in flight. ``run`` is the runner's forward pass, ``stages``
    are the names of the rest of what it does.

    Raises:
        OSError: the trace cannot be written.
        ValueError: a trace is asked for, and torch's profiler cannot see the GPU.
    """

    def __init__(
        self,
        measure: Measure,
        run: Forward,
        stages: Sequence[str],
        about: Sequence[PieceAbout],
        layers: Sequence[AttentionSpec],
        item_bytes: int,
        device: torch.device,
    ) -> None:
        if measure.trace is not None:
            if device.type == "cuda" and ProfilerActivity.CUDA not in supported_activities():
                raise ValueError(
                    f"trace {measure.trace}: torch {torch.__version__}'s profiler does not see the GPU here"
                )
            path = Path(measure.trace)
            if path.exists() and not path.is_file():  # torch would put a file in its place, in that of /dev/null too
                raise OSError(f"{path} is no file")
            path.write_bytes(b"")  # now, rather than after the last step, it is said that it cannot be
        self._measure, self._run, self._about = measure, run, {one.key: one for one in about}
        self._layers, self._item_bytes, self._device = layers, item_bytes, device
        self._clock = clock_of(device)
        self._places = [*_places(run, len(layers)), *(Place(f"host: {name}", "host") for name in stages)]
        self._attentions = [number for number, place in enumerate(self._places) if place.kind == "attention"]
        self._names: dict[tuple[int, int], str] = {}
        self._now, self._measuring = _Seen(0, [], None), False
        self._plain: list[_Seen] = []
        self._ended: list[_Seen] = []
        self._profiler: profile | None = None
        # On a GPU the profiler knows the kernels by their names, and they are no functions.
        self._kernels = _Kernels(run, {} if device.type == "cuda" else self._about)

    @property
    def done(self) -> bool:
        """Whether all steps have ended that were to be measured."""
        return len(self._ended) >= self._measure.steps

    def begin(self, step: Step) -> bool:
        """``step`` is next; whether it is to be measured."""
        self._measuring = len(self._plain) >= self._measure.plain and not self.done
        if self._measuring and self._measure.trace is not None and self._profiler is None:
            self._profiler = profile(activities=self._activities())
            self._profiler.start()
            self._kernels.name()
        lengths = [(row.start, len(row.tokens)) for row in step.rows]
        self._now = _Seen(step.number, lengths, self._clock.now())
        return self._measuring

    def end(self) -> None:
        """The step that was begun last is computed, or launched."""
        self._now.ended = self._clock.now()
        if self._measuring:
            self._ended.append(self._now)
        elif len(self._plain) < self._measure.plain:
            self._plain.append(self._now)

    def forward(self) -> Forward:
        """The forward pass, measured."""
        if not isinstance(self._run, Program):
            return self._uncompiled
        program = self._run.with_entries([self._entry(i, entry) for i, entry in enumerate(self._run.entries)])

        def run(ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: PlannedAttention) -> Tensor:
            self._now.tokens, self._now.rows = len(ids_T), len(rows_R)
            return program(ids_T, positions_T, rows_R, _Attention(self, attention))

        return run

    def host(self, stage: str, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """``function``, measured as ``stage``."""
        place = self._places.index(Place(f"host: {stage}", "host"))

        def call(*arguments: Any) -> _Result:
            return self.measured(place, function, *arguments)

        return call

    def measured(self, place: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run ``function`` at ``place``."""
        now, clock = self._now, self._clock
        with self._named(place):
            first = clock.now()
            result = function(*arguments)
            now.marks.append((place, first, clock.now()))
        return result

    def attention_place(self, layer: int) -> int:
        """Of the attention of layer ``layer``."""
        return self._attentions[layer]

    def window(self) -> Window:
        """What was measured. Nothing is measured afterwards, and what was changed in the pieces is undone."""
        trace = None
        if self._profiler is not None:
            self._kernels.restore()
            self._profiler.stop()
            trace = self._measure.trace
            assert trace is not None
            self._profiler.export_chrome_trace(trace)
            self._profiler = None
            if not Path(trace).stat().st_size:  # torch only prints an error
                raise OSError(f"{trace} could not be written")
        return Window(
            places=tuple(self._places),
            pieces=tuple(self._about.values()),
            plain=tuple(map(self._seconds, self._plain)),
            steps=tuple(map(self._read, self._ended)),
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type,
            trace=trace,
        )

    def _entry(self, place: int, entry: Entry) -> Entry:
        function = entry.function
        if function is None:
            return entry
        if self._measure.trace is not None:
            return replace(entry, function=lambda arguments: self.measured(place, function, arguments))
        clock = self._clock.now

        def call(arguments: list[Any]) -> Sequence[Any]:
            first = clock()
            made = function(arguments)
            self._now.marks.append((place, first, clock()))
            return made

        return replace(entry, function=call)

    def _uncompiled(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, attention: PlannedAttention) -> Tensor:
        self._now.tokens, self._now.rows = len(ids_T), len(rows_R)
        stretches = _Stretches(self, attention)
        logits = self._run(ids_T, positions_T, rows_R, stretches)
        stretches.finish()
        return logits

    def _named(self, place: int) -> AbstractContextManager[object]:
        if self._measure.trace is None:
            return nullcontext()
        bucket = _bucket(self._now.tokens or sum(count for _, count in self._now.lengths))
        name = self._names.setdefault((place, bucket), f"{self._places[place].name} @T={bucket}")
        return record_function(name)

    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]

    def _seconds(self, seen: _Seen) -> float:
        return self._clock.seconds(seen.began, seen.ended)

    def _read(self, seen: _Seen) -> MeasuredStep:
        """Work and seconds, which are counted and read now, out of any step's way."""
        attended = {spec: self._attention_work(spec, seen.lengths) for spec in set(self._layers)}
        spans = []
        for place, first, second in seen.marks:
            key, work = self._places[place].piece, _NOT_KNOWN
            about = self._about.get(key) if key is not None else None
            if about is not None and about.work is not None:
                sizes, moved = (seen.tokens, seen.rows), about.work.bytes
                work = None if moved is None else moved(*sizes), about.work.flops(*sizes)
            elif self._places[place].kind == "attention":
                work = attended[self._layers[self._attentions.index(place)]]
            spans.append(Span(place, self._clock.seconds(seen.began, first), self._clock.seconds(first, second), *work))
        tokens = sum(count for _, count in seen.lengths)
        seconds = self._seconds(seen)
        return MeasuredStep(seen.number, len(seen.lengths), tokens, _bucket(seen.tokens), seconds, tuple(spans))

    def _attention_work(self, spec: AttentionSpec, rows: Sequence[tuple[int, int]]) -> tuple[int, int]:
        return attention_work(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            key_size=spec.head_dim,
            value_size=spec.value_size,
            window=spec.window,
            item_bytes=self._item_bytes,
            rows=rows,
        )


class _Attention:
    """A planned attention whose layers are measured."""

    def __init__(self, recorder: Recorder, attention: PlannedAttention) -> None:
        self._recorder, self._attend = recorder, attention.attend

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        place = self._recorder.attention_place(layer)
        return self._recorder.measured(place, self._attend, q_THD, k_TKD, v_TKE, layer, sinks_H)


class _Stretches(_Attention):
    """The same of an uncompiled model: what lies between is measured from call to call."""

    def __init__(self, recorder: Recorder, attention: PlannedAttention) -> None:
        super().__init__(recorder, attention)
        self._since = recorder._clock.now()

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        self._close(self._recorder.attention_place(layer) - 1)
        out_THE = super().attend(q_THD, k_TKD, v_TKE, layer, sinks_H)
        self._since = self._recorder._clock.now()
        return out_THE

    def finish(self) -> None:
        self._close(self._recorder.attention_place(-1) + 1)

    def _close(self, place: int) -> None:
        self._recorder._now.marks.append((place, self._since, self._recorder._clock.now()))


class _Kernels:
    """The kernels that compiled pieces call, by their names in the pieces' code: named in a trace while it is taken."""

    def __init__(self, run: Forward, about: Mapping[str, PieceAbout]) -> None:
        self._found = [*_kernels(run, about), (vars(op), "linear", op.linear)] if isinstance(run, Program) else []

    def name(self) -> None:
        for scope, name, kernel in self._found:
            scope[name] = _under_its_name(name, kernel)

    def restore(self) -> None:
        for scope, name, kernel in self._found:
            scope[name] = kernel


def _kernels(program: Program, about: Mapping[str, PieceAbout]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    functions = {e.call.key: e.function for e in program.entries if isinstance(e.call, Run) and e.function is not None}
    for key, function in functions.items():
        scope: dict[str, Any] = getattr(getattr(function, "__func__", function), "__globals__", {})
        for name in (about[key].kernels or {}) if key in about else ():
            if name in scope:
                yield scope, name, scope[name]


def _under_its_name(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with record_function(name):
            return kernel(*arguments)

    return call


def _places(run: Forward, layers: int) -> Iterator[Place]:
    """In the order of a pass."""
    if isinstance(run, Program):
        for entry in run.entries:
            if isinstance(entry.call, Run):
                yield Place(entry.call.name, "piece", entry.call.key)
            else:
                yield Place(f"layers.{entry.layer}: attention", "attention")
        return
    for layer in range(layers):
        yield Place(f"uncompiled, before layers.{layer}: attention", "piece")
        yield Place(f"layers.{layer}: attention", "attention")
    yield Place(f"uncompiled, after layers.{layers - 1}: attention", "piece")


def _bucket(tokens: int) -> int:
    """The power of two that ``tokens`` fit in."""
    return 1 << max(0, tokens - 1).bit_length()
