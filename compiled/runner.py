"""Executes steps on this machine's CPU: batch → compiled pieces with paged attention between them → sampler.

Built once by `build_runner`, in this order: the model (see `compiled.build`), peak memory of a full step, KV pages,
warm-up. All calls must come from one thread, because torch's inference state belongs to a thread.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from compiled import batch as batches
from compiled import program, selfcheck
from compiled.artifacts import Cache
from compiled.attention.base import Attention, AttentionSpec
from compiled.attention.cpu import CpuAttention, load_kernel
from compiled.attention.layers import ModelAttention, Views
from compiled.attention.reference import ReferenceAttention
from compiled.build import (
    FAST,
    BuildOptions,
    Built,
    Forward,
    build_compiled,
    build_eager,
    compile_only,
    factors_of,
    keep,
)
from compiled.ceilings import measure_ceilings
from compiled.compilations import Watch
from compiled.kv_store import KVShape, KVStore, LayerShape, size_pool
from compiled.memory import peak_of
from compiled.native import KernelUnavailable
from compiled.parameters import DTYPES
from compiled.profiling import Recorder
from compiled.stages import HOST, Stages
from compiled.step import PADDING_PAGE, KVSpec, Logprob, ModelSpec, Row, Sampling, Step, StepResult
from compiled.timeline import Measure, PieceAbout, Window
from compiled.weights import Report, cache_folder, has_weights, resolve

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_PerRow = tuple[tuple[_T, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """What a runner is built from. See `streamengine.EngineConfig`, whose fields of the same names these are."""

    model: str
    dtype: str = "auto"
    eager: bool = False
    attention: str = "auto"
    threads: int = 1
    page_size: int = 16
    kv_pages: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    offline: bool = False


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
        self._steps = self._tokens = self._broken_rows = 0
        self._seconds = 0.0
        self._watch: Watch | None = None
        self._compilations = 0

    def allocate(self, store: KVStore) -> None:
        """Use ``store`` from now on."""
        self.kv: KVSpec = store.spec
        self._store = store
        self._attention = self._make_attention(store)

    def note(self, **facts: float) -> None:
        """Add to what `statistics` tells."""
        self._facts.update(facts)

    def submit(self, step: Step) -> FinishedStep:
        assert not any(row.pending for row in step.rows), "a runner of depth 1 has no step in flight"
        recorder = self._recorder
        stages = self._measured if recorder is not None and recorder.begin(step) else self._stages
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                tokens, drawn, scores = self._execute(step, stages)
        except BaseException:
            if recorder is not None:
                recorder.drop()
            raise
        seconds = time.perf_counter() - started
        if recorder is not None:
            recorder.end(seconds)
        self._steps += 1
        self._tokens += sum(len(row.tokens) for row in step.rows)
        self._seconds += seconds
        if self._watch is not None:
            for what in self._watch.look():
                self._compilations += 1
                log.error("step %d: something was compiled while serving: %s", step.number, what)
        return FinishedStep(StepResult(step.number, tokens, seconds, drawn, scores))

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

    def _execute(self, step: Step, stages: Stages) -> tuple[_PerRow[int], _PerRow[Logprob], _PerRow[Logprob]]:
        """For each row: tokens, their log-probabilities, and those of its targets."""
        batch, logits_RV = self._forward(step, stages)
        sampled = sum(batch.samples)
        tokens_R, broken = stages.sample(logits_RV[:sampled], batch.sampling, step.masks)
        if broken and not self._broken_rows:
            log.error("step %d: %d rows of the model's logits hold NaN; such ids are not drawn", step.number, broken)
        self._broken_rows += broken
        tokens = tuple(_per_row(tokens_R.tolist(), batch.samples))
        found = stages.logprobs(logits_RV, torch.cat([tokens_R, batch.targets]), batch.tops)
        drawn, scores = _per_row(found[:sampled], batch.samples), _per_row(found[sampled:], batch.scores)
        return tokens, _asked(drawn), _asked(scores)

    def _forward(self, step: Step, stages: Stages) -> tuple[batches.Batch, Tensor]:
        for source, target in step.copies:
            self._store.copy(source, target)
        batch = stages.batch(step, self.kv.page_size, program.SMALLEST)
        stages.plan(self._attention, batch)
        logits_RV = stages.run(batch.ids_T, batch.positions_T, batch.rows_R, _InOrder(self._attention))
        # Without the rows that pad the step and the ids that pad the head.
        return batch, logits_RV[: sum(batch.samples) + len(batch.targets), : self.model.vocab_size]

    def logits(self, step: Step) -> Tensor:
        """Logits ``[R, V]`` of the rows that sample, then of those that score, without sampling: for tests and
        self-checks."""
        with torch.inference_mode():
            return self._forward(step, self._stages)[1].clone()

    def check(self, expected: selfcheck.Expected) -> selfcheck.Check:
        """Raises LoadError where the logits are not the expected ones."""
        return selfcheck.check(expected, self.kv.page_size, self.logits)

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages that nobody owns with NaN: a read of what was not written since shows in ``broken_rows``."""
        self._store.poison(pages)

    def warmup(self) -> None:
        """A decoding step, a chunk and every kind of sampling, on the padding page's memory only."""
        greedy, whole = Sampling(), Sampling(temperature=1.0)
        cut = Sampling(
            temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, typical_p=0.5, repetition_penalty=1.1, logprobs=1
        )
        for lengths in ((1,), (1, 1, 1), (self.kv.page_size, 1)):
            rows = (
                Row(i, (0,) * length, 0, (0,), sampling, history=(0,) * length, targets=(0,) * length)
                for i, (length, sampling) in enumerate(zip(lengths, (cut, whole, greedy), strict=False))
            )
            self.submit(Step(0, tuple(rows)))
        self.note(warmup_seconds=self._seconds)
        self._steps = self._tokens = self._broken_rows = 0
        self._seconds = 0.0
        self._watch, self._compilations = Watch(), 0

    def statistics(self) -> dict[str, float]:
        return self._facts | {
            "steps": self._steps,
            "step_tokens": self._tokens,
            "step_seconds": self._seconds,
            "broken_rows": self._broken_rows,
            "compilations_after_ready": self._compilations,
            "kv_bytes": self.kv.pages * self.kv.page_bytes,
        }


def _per_row(items: Iterable[_T], counts: Iterable[int]) -> Iterator[tuple[_T, ...]]:
    """The next ``counts[i]`` items for row i."""
    rest = iter(items)
    return (tuple(islice(rest, count)) for count in counts)


def _asked(found: Iterable[tuple[Logprob | None, ...]]) -> _PerRow[Logprob]:
    """What was asked for; nothing at all where no row asked."""
    rows = tuple(tuple(one for one in row if one is not None) for row in found)
    return rows if any(rows) else ()


class _InOrder:
    """A planned attention for an uncompiled forward pass, whose layers come in order and without a number."""

    def __init__(self, attention: ModelAttention) -> None:
        self.attend = attention.attend
        self._next = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        self._next += 1
        return self.attend(query, key, value, self._next - 1, sinks)


def build_runner(
    options: RunnerOptions,
    report: Report,
    check: Callable[[Path], object] = lambda folder: None,
    build: BuildOptions = FAST,
) -> CpuRunner:
    """A runner that is ready but for its warm-up. ``check`` sees the model's folder before anything slow is done.

    Raises:
        LoadError: one line that says why this model cannot be served here.
    """
    torch.set_num_threads(options.threads)
    folder = resolve(options.model, offline=options.offline, report=report)
    check(folder)
    cache = open_cache(options)
    with ThreadPoolExecutor(1, "streamengine-kernel") as beside:
        backend = beside.submit(_backend, options)
        built = _build(folder, options, report, cache, build)
        attention = _attention(built.layers, options, *backend.result())
    log.info(
        "%s in %s: %d calls of %d compiled pieces; %s", built.spec.architecture, built.spec.dtype, built.pieces,
        built.unique, ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in built.seconds.items()),
    )  # fmt: skip
    runner = CpuRunner(built.spec, built.run, attention, built.layers, built.about)
    runner.note(**{f"{stage}_seconds": seconds for stage, seconds in built.seconds.items()}, **built.work)
    _allocate(runner, built, options)
    if built.fresh is not None:
        expected = built.fresh.expected
        keep(cache, options.model, built.fresh, None if expected is None else runner.check(expected))
    return runner


def _build(folder: Path, options: RunnerOptions, report: Report, cache: Cache, build: BuildOptions) -> Built:
    what = (folder, options.model, pick_dtype(options.dtype), options.max_model_len, report)
    if options.eager:
        return build_eager(*what)
    return build_compiled(*what, cache, build)


def open_cache(options: RunnerOptions) -> Cache:
    """What was compiled before, for so many threads."""
    return Cache(cache_folder() / "compiled", options.threads)


def precompile(options: RunnerOptions, report: Report) -> bool:
    """Do all that a first start compiles, so that the next one compiles nothing; False where there was nothing to do.
    A folder with a config and no weights will do; where there are weights, what was compiled is checked with them.

    Raises:
        LoadError: one line that says why this model cannot be served here.
    """
    torch.set_num_threads(options.threads)
    folder = resolve(options.model, offline=options.offline, report=report, weights=False)
    what = (folder, pick_dtype(options.dtype), options.max_model_len, open_cache(options))
    if has_weights(folder):
        known = what[-1].explain(options.model, factors_of(*what, FAST)) is None
        build_runner(options, report).warmup()
        return not known
    pick_attention(options.attention, cache_folder() / "kernels")
    return compile_only(folder, options.model, *what[1:3], report, what[3])


def explain(options: RunnerOptions, report: Report) -> str | None:
    """Why the next start would compile, None if it would not. Raises LoadError for a model that is not there."""
    folder = resolve(options.model, offline=options.offline, report=report, weights=False)
    cache = open_cache(options)
    factors = factors_of(folder, pick_dtype(options.dtype), options.max_model_len, cache, FAST)
    return cache.explain(options.model, factors)


def pick_dtype(asked: str) -> torch.dtype:
    """``auto`` is bfloat16 where the CPU multiplies it natively; elsewhere it would be emulated."""
    if asked == "auto":
        able = torch.cpu.get_capabilities()
        asked = "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16") else "float32"
    return DTYPES[asked]


def pick_attention(asked: str, kernels: Path) -> tuple[str, str]:
    """The backend that would be used, and the reason where it is not the one hoped for."""
    if asked == "reference":
        return "reference", ""
    try:
        load_kernel(kernels)
    except KernelUnavailable as error:
        return "reference", str(error)
    return "cpu", ""


def _backend(options: RunnerOptions) -> tuple[str, str]:
    asked = "reference" if options.eager and options.attention == "auto" else options.attention
    return pick_attention(asked, cache_folder() / "kernels")


def _attention(
    layers: Sequence[AttentionSpec], options: RunnerOptions, backend: str, reason: str
) -> Callable[[KVStore], ModelAttention]:
    missing = {spec: CpuAttention.lacks(spec) for spec in layers} if backend == "cpu" else {}
    if reason := reason or next(filter(None, missing.values()), ""):
        log.warning("attention runs in plain PyTorch, which is slow: %s", reason)

    def make(spec: AttentionSpec, views: Views) -> Attention:
        if backend == "reference" or missing[spec]:
            return ReferenceAttention(spec, views)
        return CpuAttention(spec, views, load_kernel(cache_folder() / "kernels"), threads=options.threads)

    return lambda store: ModelAttention(layers, store.layers, make)


def _allocate(runner: CpuRunner, model: Built, options: RunnerOptions) -> None:
    """Measure the peak of a full step on a small pool, then make the real one."""
    layers = tuple(LayerShape(spec.num_kv_heads, spec.head_dim, spec.value_size) for spec in model.layers)
    windows = {spec.window for spec in model.layers}
    window = windows.pop() if len(windows) == 1 else None
    shape = KVShape(layers, options.page_size, DTYPES[model.spec.dtype], window)
    runner.allocate(KVStore(shape, 1 + options.max_num_seqs + options.max_num_batched_tokens // options.page_size))
    step = _full_step(options)
    step_bytes = peak_of(lambda: runner.submit(step))
    pages = size_pool(
        shape,
        asked=options.kv_pages,
        wanted_tokens=options.max_num_seqs * model.spec.max_model_len,
        max_model_len=model.spec.max_model_len,
        reserved=step_bytes,
    )
    runner.allocate(KVStore(shape, pages))
    runner.note(threads=options.threads, step_bytes=step_bytes)


def _full_step(options: RunnerOptions) -> Step:
    """The whole budget, split over as many sampling rows as may run, with the logits of every token."""
    share, rest = divmod(options.max_num_batched_tokens, options.max_num_seqs)
    rows, page = [], PADDING_PAGE + 1
    for i in range(options.max_num_seqs):
        tokens = share + (i < rest)
        pages = -(-tokens // options.page_size)
        ids = (0,) * tokens
        rows.append(Row(i, ids, 0, tuple(range(page, page + pages)), Sampling(temperature=1.0), targets=ids))
        page += pages
    return Step(0, tuple(rows))
