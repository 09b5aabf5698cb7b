"""The attention contract on the device: the conformance tests' cases, as far as their kernels are there."""

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled.attention import modules
from compiled.attention.modules import Module
from profiles.gpu.bench import Bench
from tests.compiled import test_conformance as grid
from tests.compiled.backends import TOLERANCE, Backend, assert_right, backend_of, dense
from tests.compiled.paged import Batch


def check(bench: Bench) -> None:
    """Cases are drawn from all kinds in turns until the time for it has passed."""
    os.environ[modules.DISABLE] = "1"  # a module that is not there would be compiled for minutes
    backend = backend_of("flashinfer" if bench.sizes.device == "cuda" else "reference")
    there: dict[Module, bool] = {}
    kinds: dict[str, Iterator[dict[str, Any]]] = {
        "prefill": _shuffled(grid.prefills), "decode": _shuffled(grid.decodes), "window": _shuffled(grid.windows),
        "mixed": _mixed(), "graph": _graphs(),
    }  # fmt: skip
    runs, deadline = dict.fromkeys(kinds, 0), time.monotonic() + bench.sizes.conformance_s
    while kinds and time.monotonic() < deadline:
        for kind in list(kinds):
            case = next((case for case in kinds[kind] if _has(backend, case, there)), None)
            if case is None:
                del kinds[kind]
                continue
            bench.facts["case"] = f"{kind} {case}"
            (_in_graph if kind == "graph" else _eager)(backend, case)
            runs[kind] += 1
    bench.facts |= {"case": None, "runs": runs, "without a module": [str(one) for one, has in there.items() if not has]}
    bench.show("cases that equal dense attention: {runs}; not run, for want of a module: {without a module}")
    bench.expect(sum(runs.values()) > 0, "there is no module for any case")


def _eager(backend: Backend, case: dict[str, Any]) -> None:
    assert_right(backend.batch(**case), backend)


def _in_graph(backend: Backend, case: dict[str, Any]) -> None:
    """Captured with one page a row, replayed with long rows, with fewer, and with long ones again."""
    batches = [backend.batch([(1, n) for n in lengths], **case) for lengths in ([54] * 5, [700, 54, 1, 33], [16, 2048])]
    graph = grid.InGraph(backend, 5, batches)
    graph.capture()
    for batch in (*batches, batches[1]):
        graph.plan(batch)
        out = graph.replay()
        torch.testing.assert_close(out[: len(batch.rows)].double(), dense(batch), **TOLERANCE[batch.dtype])
        assert bool(out.isfinite().all())


def _shuffled(cases: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    found = list(cases())
    random.Random(0).shuffle(found)
    return iter(found)


def _shapes() -> Iterator[dict[str, Any]]:
    for head_dim in (64, 128):
        for heads, kv_heads in ((32, 8), (8, 8), (14, 2), (32, 4)):
            for window, float8 in ((None, False), (40, False), (None, True)):
                yield {
                    "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16,
                    "window": window, "float8": float8,
                }  # fmt: skip


def _mixed() -> Iterator[dict[str, Any]]:
    return ({**shape, "rows": rows, "padding": 3} for shape in _shapes() for rows in grid.MIXED.values())


def _graphs() -> Iterator[dict[str, Any]]:
    return _shapes()


def _has(backend: Backend, case: dict[str, Any], there: dict[Module, bool]) -> bool:
    """Whether the kernel of ``case`` is there, without compiling it."""
    batch = Batch(**{"rows": [(1, 1)], **{name: value for name, value in case.items() if name != "rows"}})
    if backend.kind.lacks(batch.spec, batch.dtype, batch.cache.dtype):
        return False
    if backend.kind.name != "flashinfer":
        return True
    names = (str(dtype).removeprefix("torch.") for dtype in (batch.dtype, batch.cache.dtype))
    (module,) = modules.needed([batch.spec], *names)
    if module not in there:
        there[module] = bool(modules.spec_of(module).is_aot)
    return there[module]
