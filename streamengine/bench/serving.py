"""What a frame costs the server's event loop, and whether it keeps up with many streams at once.

As in earnest there are three processes: the server's, whose loop is measured, the core, with a runner that gives every
row a token each `TICK_S`, and the client, which only reads.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from streamengine import compose
from streamengine.bench.ticking import TICK_S, Words
from streamengine.config import EngineConfig, ServerConfig
from streamengine.engine import Engine
from streamengine.errors import EngineFailure
from streamengine.link import Progress
from streamengine.server import Server

CASES = ((1, 0), (64, 0), (256, 0), (256, 25))
"""Streams, and the milliseconds for which the server may gather their tokens: what the browser's client allows."""
TOKENS = 1000
PATIENCE_S = 60.0
ENOUGH = 0.97
"""Share of the tokens per second that counts as keeping up: the first token and the end take their time."""


def measure(config: EngineConfig, report: Callable[[Progress], None], show: Callable[[str], None]) -> dict[str, Any]:
    """Rates and shares of CPU in each of `CASES`; every stream has a connection of its own and gets `TOKENS` tokens."""
    most, pages = max(streams for streams, _ in CASES), -(-(TOKENS + 2) // config.page_size)
    config = msgspec.structs.replace(
        config,
        max_num_seqs=most,
        max_num_batched_tokens=max(config.max_num_batched_tokens, most),
        max_model_len=TOKENS + 2,
        kv_pages=1 + most * pages,
    )
    rows = anyio.run(_measure_all, config, report, show, backend_options={"use_uvloop": True})
    return {"tick_ms": TICK_S * 1e3, "tokens": TOKENS, "rows": rows}


async def _measure_all(
    config: EngineConfig, report: Callable[[Progress], None], show: Callable[[str], None]
) -> list[dict[str, Any]]:
    ready = anyio.Event()
    core = partial(compose.core_process, "streamengine.bench.core")

    def open_engine(tell: Callable[[Progress], None]) -> Engine:
        return Engine(config, core, lambda folder: Words(), progress=tell)

    settings = ServerConfig(port=0, retain_s=0, drain_s=0)
    server = Server(settings, open_engine, ready=lambda url: ready.set())
    rows, failure = [], None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        try:
            with anyio.fail_after(PATIENCE_S):
                await ready.wait()
            await _measure(server, 1, 0, min(TOKENS, 100))  # warms everything up
            for streams, coalesce_ms in CASES:
                rows.append(await _measure(server, streams, coalesce_ms, TOKENS))
                show(_line(rows[-1]))
        except EngineFailure as error:
            failure = error  # out of the group before it is raised, or the group would wrap it
        server.stop()
    if failure is not None:
        raise failure
    return rows


async def _measure(server: Server, streams: int, coalesce_ms: int, tokens: int) -> dict[str, Any]:
    engine = server.service.engine
    assert engine is not None, "ready"
    arguments = [server.url.rpartition(":")[2], *map(str, (streams, tokens, coalesce_ms))]
    command = [sys.executable, "-m", "streamengine.bench.reader", *arguments]
    async with await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None) as process:
        assert process.stdin is not None and process.stdout is not None, "pipes"
        output = BufferedByteReceiveStream(process.stdout)
        try:
            with anyio.fail_after(PATIENCE_S + tokens * TICK_S * 4):
                await output.receive_until(b"\n", 100)
                before, core = _Thread.now(), await engine.statistics()
                await process.stdin.send(b"go\n")
                read = json.loads(b"".join([part async for part in output]))
        except (anyio.EndOfStream, anyio.IncompleteRead, TimeoutError, ValueError) as error:
            process.kill()
            raise EngineFailure(f"the client of {streams} streams did not read them all: {error!r}") from error
    loop, core_s = _Thread.now() - before, (await engine.statistics())["runner_cpu_s"] - core["runner_cpu_s"]
    seconds = read["seconds"]
    frames = sum(end["delivery"]["frames"] for end in read["ends"])
    got = sum(end["usage"]["completion_tokens"] for end in read["ends"])
    return {
        "streams": streams,
        "coalesce_ms": coalesce_ms,
        "tokens_per_s": got / seconds,
        "asked_per_s": streams / TICK_S,
        "keeps_up": got / seconds >= ENOUGH * streams / TICK_S,
        "frames_per_s": frames / seconds,
        "tokens_per_frame": got / frames,
        "cpu_us_per_frame": loop.cpu / frames * 1e6,
        "kernel_us_per_frame": loop.kernel / frames * 1e6,
        "cpu_us_per_token": loop.cpu / got * 1e6,
        "loop_percent": 100 * loop.cpu / loop.clock,
        "loop_waited_percent": 100 * loop.waited / loop.clock,
        "core_percent": 100 * core_s / loop.clock,
        "client_percent": 100 * read["cpu_s"] / seconds,
    }


class _Thread(NamedTuple):
    """Seconds of the calling thread: on the clock, computing, in the kernel of that, waiting for a core to run on."""

    clock: float
    cpu: float
    kernel: float
    waited: float

    @classmethod
    def now(cls) -> "_Thread":
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return cls(time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_stime, waited)

    def __sub__(self, other: "_Thread") -> "_Thread":
        return _Thread(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def _line(row: dict[str, Any]) -> str:
    return (
        "serve  {streams:>3} streams, coalesced {coalesce_ms:>2} ms: {tokens_per_s:6.0f} of {asked_per_s:5.0f} "
        "tokens/s, {verdict}; {frames_per_s:6.0f} frames/s of {tokens_per_frame:5.2f} tokens; "
        "loop {cpu_us_per_frame:6.1f} µs a frame ({kernel_us_per_frame:.1f} in the kernel), {cpu_us_per_token:5.1f} "
        "a token; of a core: loop {loop_percent:3.0f} % (waiting for one {loop_waited_percent:.0f} %), "
        "core {core_percent:.0f} %, client {client_percent:.0f} %"
    ).format(**row, verdict="keeps up" if row["keeps_up"] else "falls behind")
