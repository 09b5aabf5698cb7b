"""Executes steps on this machine's CPU: batch → compiled pieces with paged attention between them → sampler.

Built once by `build_runner`, in this order: the model (see `compiled.build`), peak memory of a full step, KV pages,
warm-up. All calls must come from one thread, because torch's inference state belongs to a thread.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from operator import attrgetter, is_not
from pathlib import Path

import torch
from torch import Tensor

from compiled import program, rehearsal, selfcheck
from compiled.allocation import LocalRunner, allocate
from compiled.answers import answer
from compiled.artifacts import Cache
from compiled.attention.base import FP8, AttentionSpec
from compiled.attention.layers import ModelAttention
from compiled.backends import MakeAttention, choose_backend
from compiled.batch import Batch
from compiled.build import (
    FAST,
    BuildOptions,
    Built,
    build_compiled,
    build_eager,
    compile_only,
    factors_of,
    keep,
)
from compiled.ceilings import measure_ceilings, plain_read
from compiled.choices import RunnerOptions, pick_attention, pick_device, pick_dtype, pick_kv_dtype
from compiled.compilations import Watch
from compiled.device import Device
from compiled.gpu.buckets import Buckets
from compiled.gpu.cuda import Cuda
from compiled.gpu.graphs import Graphs
from compiled.gpu.passes import Passes, Ungraphed
from compiled.gpu.recording import Recording
from compiled.gpu.runner import GpuRunner
from compiled.kv_scales import read_scales
from compiled.kv_store import KVStore
from compiled.parameters import DTYPES
from compiled.profiling import Recorder
from compiled.program import Forward
from compiled.stages import HOST, Stages
from compiled.step import KVMemory, KVSpec, Logprob, ModelSpec, Step, StepResult
from compiled.timeline import Measure, PieceAbout, Window
from compiled.weights import Report, cache_folder, has_weights, resolve

__all__ = [
    "CpuRunner",
    "LocalRunner",
    "RunnerOptions",
    "build_runner",
    "explain",
    "open_cache",
    "pick_attention",
    "pick_device",
    "pick_dtype",
    "precompile",
]

log = logging.getLogger(__name__)


class FinishedStep:
    """The handle of a step that is done when it is submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class CpuRunner:
    """See `compiled.step.Runner`. ``depth`` is 1: a step is finished when `submit` returns."""

    depth = 1

    def __init__(
        self,
        model: ModelSpec,
        run: Forward,
        attention: Callable[[KVStore], ModelAttention],
        layers: Sequence[AttentionSpec] = (),
        about: Sequence[PieceAbout] = (),
    ) -> None:
        self.model = model
        self._stages = Stages(run)
        self._make_attention = attention
        self._layers, self._about = layers, about
        self._recorder: Recorder | None = None
        self._measured = self._stages
        self._facts: dict[str, float] = {}
        self._watch: Watch | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._broken_rows = self._compilations = 0
        self._seconds = self._forward_seconds = self._sample_seconds = 0.0

    def allocate(self, store: KVStore) -> None:
        """Use ``store`` from now on."""
        self.kv: KVSpec = store.spec
        self._store = store
        self._attention = self._make_attention(store)

    def note(self, **facts: float) -> None:
        """Add to what `statistics` tells."""
        self._facts.update(facts)

    def submit(self, step: Step) -> FinishedStep:
        assert not any(map(attrgetter("pending"), step.rows)), "a runner of depth 1 has no step in flight"
        recorder = self._recorder
        stages = self._measured if recorder is not None and recorder.begin(step) else self._stages
        started = time.perf_counter()
        with torch.inference_mode():
            batch, tokens, found = self._execute(step, stages)
        seconds = time.perf_counter() - started
        if recorder is not None:
            recorder.end()
        self._steps += 1
        self._tokens += sum(map(len, map(attrgetter("tokens"), step.rows)))
        self._seconds += seconds
        if self._watch is not None:
            for what in self._watch.look():
                self._compilations += 1
                log.error("step %d: something was compiled while serving: %s", step.number, what)
        return FinishedStep(answer(step.number, batch, range(len(step.rows)), tokens, found, seconds))

    def profile(self, measure: Measure) -> None:
        """See `compiled.timeline.Profiled`."""
        self.profiled(stop=True)
        keys, _ = self._store.layers[0]
        self._recorder = Recorder(
            measure, self._stages.run, HOST, self._about, self._layers, keys.itemsize, device=keys.device
        )
        self._measured = self._stages.measured(self._recorder)

    def profiled(self, *, stop: bool = False) -> Window | None:
        """See `compiled.timeline.Profiled`."""
        recorder = self._recorder
        if recorder is None or not (stop or recorder.done):
            return None
        self._recorder, self._measured = None, self._stages
        return recorder.window()

    def ceilings(self) -> dict[str, float]:
        """See `compiled.timeline.Profiled`."""
        return measure_ceilings(self.model.dtype)

    def plain_read(self, size: int) -> Callable[[], float]:
        """See `compiled.timeline.Profiled`."""
        return plain_read(size)

    def _execute(self, step: Step, stages: Stages) -> tuple[Batch, list[int], Sequence[Logprob | None]]:
        """The tokens that were sampled, and what is reported of all logit rows, or nothing of any."""
        batch = self._prepare(step, stages)
        started = time.perf_counter()
        logits_RV = self._forward(batch, stages)
        computed = time.perf_counter()
        sampled = sum(batch.samples)
        tokens_R, broken = stages.sample(logits_RV[:sampled], batch.sampling, step.masks)
        if broken and not self._broken_rows:
            log.error("step %d: %d rows of the model's logits hold NaN; such ids are not drawn", step.number, broken)
        self._broken_rows += broken
        self._forward_seconds += computed - started
        self._sample_seconds += time.perf_counter() - computed
        if not any(map(is_not, batch.tops, repeat(None))):
            return batch, tokens_R.tolist(), ()
        found = stages.logprobs(logits_RV, torch.cat([tokens_R, batch.targets]), batch.tops)
        return batch, tokens_R.tolist(), found

    def _prepare(self, step: Step, stages: Stages) -> Batch:
        for source, target in step.copies:
            self._store.copy(source, target)
        batch = stages.batch(step, self.kv.page_size, program.SMALLEST)
        stages.plan(self._attention, batch)
        return batch

    def _forward(self, batch: Batch, stages: Stages) -> Tensor:
        logits_RV = stages.run(batch.ids_T, batch.positions_T, batch.rows_R, self._attention)
        # Without the rows that pad the step and the ids that pad the head.
        return logits_RV[: sum(batch.samples) + len(batch.targets), : self.model.vocab_size]

    def logits(self, step: Step) -> Tensor:
        """Logits ``[R, V]`` of the rows that sample, then of those that score, without sampling: for tests and
        self-checks."""
        with torch.inference_mode():
            return self._forward(self._prepare(step, self._stages), self._stages).clone()

    def check(self, expected: selfcheck.Expected) -> selfcheck.Check:
        """Raises LoadError where the logits are not the expected ones."""
        return selfcheck.check(expected, self.kv.page_size, self.logits)

    def kv_memory(self) -> KVMemory | None:
        return self._store.memory()

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages that nobody owns with NaN: a read of what was not written since shows in ``broken_rows``."""
        self._store.poison(pages)

    def warmup(self) -> None:
        """Every kind of step."""
        for step in rehearsal.warm_up(self.kv.page_size):
            self.submit(step)
        self.note(warmup_seconds=self._seconds)
        self._reset()
        self._watch = Watch()

    def statistics(self) -> dict[str, float]:
        """Of the steps' seconds, ``forward_seconds`` went into pieces and attention, ``sample_seconds`` into choosing
        tokens, ``host_seconds`` into all else: batch, plan, log-probabilities, results."""
        return self._facts | {
            "steps": self._steps,
            "step_tokens": self._tokens,
            "step_seconds": self._seconds,
            "forward_seconds": self._forward_seconds,
            "sample_seconds": self._sample_seconds,
            "host_seconds": self._seconds - self._forward_seconds - self._sample_seconds,
            "broken_rows": self._broken_rows,
            "compilations_after_ready": self._compilations,
            "kv_bytes": self.kv.pages * self.kv.page_bytes,
        }


def build_runner(
    options: RunnerOptions,
    report: Report,
    check: Callable[[Path], object] = lambda folder: None,
    build: BuildOptions = FAST,
) -> LocalRunner:
    """A runner that is ready but for its warm-up. ``check`` sees the model's folder before anything slow is done.

    Raises:
        LoadError: one line that says why this model cannot be served here.
    """
    torch.set_num_threads(options.threads)
    device = _open_device(options)
    folder = resolve(options.model, offline=options.offline, report=report)
    check(folder)
    where = torch.device("cpu") if device is None else device.torch
    cache = open_cache(options, where)
    with ThreadPoolExecutor(1, "streamengine-kernel") as beside:
        choosing = beside.submit(choose_backend, options, device)
        built = _build(folder, options, report, cache, build, where)
        backend = choosing.result()
    dtype = DTYPES[built.spec.dtype]
    kv_dtype = pick_kv_dtype(options.kv_dtype, dtype)
    scales = read_scales(folder, len(built.layers)) if kv_dtype == FP8 else None
    attention = backend.attention(built.layers, dtype, kv_dtype, scales)
    log.info(
        "%s in %s: %d calls of %d compiled pieces; %s", built.spec.architecture, built.spec.dtype, built.pieces,
        built.unique, ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in built.seconds.items()),
    )  # fmt: skip
    runner: LocalRunner
    if device is None:
        runner = CpuRunner(built.spec, built.run, attention, built.layers, built.about)
    else:
        passes = _passes(built, attention, device, options, backend.captures)
        runner = GpuRunner(built.spec, device, passes, built.layers, built.about)
    runner.note(**{f"{stage}_seconds": seconds for stage, seconds in built.seconds.items()}, **built.work)
    allocate(runner, built, options, kv_dtype, device)
    backend.seal()
    if built.fresh is not None:
        expected = built.fresh.expected
        keep(cache, options.model, built.fresh, None if expected is None else runner.check(expected))
    return runner


def _open_device(options: RunnerOptions) -> Device | None:
    """None is this machine's CPU, on which a step is done when it was submitted."""
    name = pick_device(options.device)
    if name == "recording":
        return Recording()
    return Cuda() if name == "cuda" else None


def _passes(
    built: Built, attention: MakeAttention, device: Device, options: RunnerOptions, captures: bool
) -> Callable[[KVStore], Passes]:
    # A step that scores a prompt has a logit row for each of its tokens beside those that are sampled.
    most = options.max_num_batched_tokens + options.max_num_seqs
    row_pages = -(-built.spec.max_model_len // options.page_size)
    graphs: Graphs | None = None

    def over(store: KVStore) -> Passes:
        nonlocal graphs
        if not (captures and options.graphs and isinstance(built.run, program.Program)):
            return Ungraphed(built.run, attention(store), device)
        pages = min(row_pages, store.spec.pages)
        if graphs is None:
            buckets = Buckets.of(options.max_num_seqs, options.max_num_batched_tokens)
            graphs = Graphs(built.run, attention(store), device, buckets, most, pages)
        else:  # those of the rehearsal, which has shown how much memory they take
            graphs.move(attention(store), pages)
        return graphs

    return over


def _build(
    folder: Path, options: RunnerOptions, report: Report, cache: Cache, build: BuildOptions, where: torch.device
) -> Built:
    what = (folder, options.model, pick_dtype(options.dtype, where.type), options.max_model_len, report)
    if options.eager:
        return build_eager(*what, where)
    return build_compiled(*what, cache, build, where)


def open_cache(options: RunnerOptions, where: torch.device) -> Cache:
    """What was compiled before for ``where``, and so many threads."""
    return Cache(cache_folder() / "compiled", options.threads, where)


def precompile(options: RunnerOptions, report: Report) -> bool:
    """Do all that a first start compiles, so that the next one compiles nothing; False where there was nothing to do.
    A folder with a config and no weights will do; where there are weights, what was compiled is checked with them.

    Raises:
        LoadError: one line that says why this model cannot be served here.
    """
    torch.set_num_threads(options.threads)
    folder = resolve(options.model, offline=options.offline, report=report, weights=False)
    where, what = _compiled(folder, options)
    if has_weights(folder):
        known = what[-1].explain(options.model, factors_of(*what, FAST)) is None
        build_runner(options, report).warmup()
        return not known
    folder, dtype, max_model_len, cache = what
    pick_attention(options.attention, cache_folder() / "kernels", where.type)
    return compile_only(folder, options.model, dtype, max_model_len, where, report, cache)


def explain(options: RunnerOptions, report: Report) -> str | None:
    """Why the next start would compile, None if it would not. Raises LoadError for a model that is not there."""
    folder = resolve(options.model, offline=options.offline, report=report, weights=False)
    _, what = _compiled(folder, options)
    return what[-1].explain(options.model, factors_of(*what, FAST))


def _compiled(folder: Path, options: RunnerOptions) -> tuple[torch.device, tuple[Path, torch.dtype, int | None, Cache]]:
    """Where the model would run, and what decides about its code."""
    where = torch.device("cuda", 0) if pick_device(options.device) == "cuda" else torch.device("cpu")
    return where, (folder, pick_dtype(options.dtype, where.type), options.max_model_len, open_cache(options, where))
