"""``make soak``: a server under 200 clients, most of them rude, for minutes; what it keeps afterwards is a fault.

This process is the server; its core, over a fake runner, and the clients are processes of their own. It fails, with
exit status 1, when memory grows, when pages, streams, connections or tasks are left, when an answer is wrong, or when
a client that did nothing wrong meets an error.
"""

import argparse
import gc
import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio

from profiles.core import resident
from profiles.crowd import visit
from streamengine import compose
from streamengine.config import EngineConfig, ServerConfig
from streamengine.engine import Engine
from streamengine.link import Progress
from streamengine.server import Server
from tests.fakes import ByteTokenizer

GROWTH_BYTES = 24 * 1024 * 1024
"""What the server's resident memory may grow by after the warm-up: the allocator's fragments, not streams."""
SETTLE_S = 40.0


class Logged(logging.Handler):
    """Counts what the server logs, for the report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[record.getMessage()[:60]] += 1


async def soak(seconds: float, seed: int) -> list[str]:
    """What went wrong."""
    ready, logged = anyio.Event(), Logged()
    logging.getLogger().addHandler(logged)
    core = partial(compose.core_process, "profiles.core")
    settings = EngineConfig(max_num_seqs=48, enable_prefix_caching=False)

    def open_engine(tell: Callable[[Progress], None]) -> Engine:
        return Engine(settings, core, lambda folder: ByteTokenizer(), progress=tell)

    config = ServerConfig(port=0, linger_s=10, retain_s=15, drain_s=1, ack_stall_s=2)
    server = Server(config, open_engine, ready=lambda url: ready.set())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        with anyio.fail_after(SETTLE_S):
            await ready.wait()
        idle, memory = len(anyio.get_running_tasks()), [await _resident(server)]
        report = await _crowd(server, seconds, seed, memory)
        left = await _settled(server, idle)
        memory.append(await _resident(server))
        assert server.service.engine is not None, "ready"
        totals = await server.service.engine.statistics()
        server.stop()
    _say("memory        " + " → ".join(f"{size / 2**20:.1f}" for size in memory) + " MiB, the last one idle")
    _say(
        "engine        {engine_submitted:.0f} requests, {generated_tokens:.0f} tokens, {steps:.0f} steps".format(
            **totals
        )
    )
    report["logged"] = logged.counts
    for name in ("visits", "errors", "logged"):
        _say(f"{name:13} " + ", ".join(f"{key} {count}" for key, count in sorted(report[name].items())))
    _say(
        "well-behaved  {streams} streams, {tokens} tokens, from one to the next p50 {p50:.1f} ms, p99 {p99:.1f} ms; "
        "{attached} times attached again".format(**report)
    )
    faults = [*report["faults"], *(f"{count:g} {name} left" for name, count in left.items() if count)]
    grown = max(memory[2:]) - memory[1]
    if grown > GROWTH_BYTES:
        faults.append(f"memory grew by {grown / 2**20:.1f} MiB after the warm-up, at most {GROWTH_BYTES / 2**20:.0f}")
    if not (report["streams"] and report["attached"]):
        faults.append("no client read an answer, or none came back")
    return faults


async def _crowd(server: Server, seconds: float, seed: int, memory: list[int]) -> dict[str, Any]:
    """The report of the clients' process. ``memory`` gets the server's each minute, in a short run five times."""
    command = [
        sys.executable,
        "-m",
        "profiles.soak",
        f"--clients={server.url}",
        f"--seconds={seconds}",
        f"--seed={seed}",
    ]
    begun, every = time.monotonic(), min(60.0, seconds / 5)
    async with await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None) as clients:
        assert clients.stdout is not None, "a pipe"
        try:
            with anyio.fail_after(seconds + SETTLE_S):
                while time.monotonic() - begun < seconds - every / 2:
                    await anyio.sleep(every)
                    memory.append(await _resident(server))
                    now, sockets = time.monotonic() - begun, server.service.connections
                    _say(f"{now:5.0f} s  {memory[-1] / 2**20:6.1f} MiB, {sockets} WebSockets")
                report: dict[str, Any] = json.loads(b"".join([part async for part in clients.stdout]))
        except BaseException:
            with suppress(ProcessLookupError):
                clients.kill()
            raise
    return report


async def _settled(server: Server, idle: int) -> dict[str, float]:
    """What is still there when everything has had the time to end."""
    left: dict[str, float] = {}
    for _ in range(int(SETTLE_S / 0.1)):
        left = await _left(server, idle)
        if not any(left.values()):
            break
        await anyio.sleep(0.1)
    gc.collect()
    return left


async def _left(server: Server, idle: int) -> dict[str, float]:
    service = server.service
    assert service.engine is not None and service.streams is not None
    now = await service.engine.statistics()
    return {
        "pages": now["kv_pages_used"],
        "running requests": now["running"] + now["waiting"] + now["engine_open"],
        "streams": service.streams.statistics()["streams_kept"],
        "connections": service.connections,
        "tasks": max(0, len(anyio.get_running_tasks()) - idle),
    }


async def _resident(server: Server) -> int:
    """Of the server and its core."""
    assert server.service.engine is not None, "ready"
    core = await server.service.engine.statistics()
    return resident() + int(core["runner_resident_bytes"])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", metavar="URL", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    options: dict[str, Any] = {"backend_options": {"use_uvloop": True}}
    if asked.clients:
        json.dump(anyio.run(visit, asked.clients, asked.seconds, asked.seed, **options), sys.stdout)
        return 0
    faults = anyio.run(soak, asked.seconds, asked.seed, **options)
    for fault in faults:
        _say(f"FAULT      {fault}")
    _say("failed" if faults else "passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
