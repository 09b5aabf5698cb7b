"""Whether a grammar compiles within bounds, tried where it can be stopped, or crash.

The grammar engine bounds what it does by fuel of its own, except where regular expressions are intersected: thirty
small patterns in an ``allOf`` keep its constructor busy for ever, at a hundred megabytes a second, in a thread that
nothing can end. And where it counts beyond its integers it recurses until the process dies. So each grammar is first
compiled in a process with limits. It says nothing but that it has come to an end; what is wrong with a grammar the
real compile tells.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from select import select
from threading import Lock

import msgspec

from streamengine.errors import GrammarError
from streamengine.guided import attempt
from streamengine.guided.attempt import CPU_S, MEMORY_BYTES
from streamengine.guided.grammar import Grammar

PATIENCE_S = 30.0
"""The limit is on its time on a processor; this is for one that does not get any."""


class Trial:
    """Threads may share it: each `check` that runs at once has a process of its own, which is kept for the next."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError: compiling it takes too much time or memory, or crashes."""
        # Most fronts never need the grammar engine, and it takes a while to import.
        from streamengine.guided.matcher import LIMITS, parts_of

        question = msgspec.json.encode([LIMITS, parts_of(grammar)]) + b"\n"
        worker = self._take()
        if worker is None or not _compiles(worker, question):
            self._drop(worker)
            raise GrammarError(f"it cannot be compiled within {CPU_S} s and {MEMORY_BYTES >> 20} MiB")
        with self._lock:
            self._busy.discard(worker)
            self._idle.append(worker)

    def close(self) -> None:
        """Whoever still waits in `check` is told that it failed."""
        with self._lock:
            self._closed, workers = True, [*self._idle, *self._busy]
        for worker in workers:
            worker.kill()
        for worker in self._idle:
            self._drop(worker)
        self._idle.clear()

    def _take(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._closed:
                return None
            worker = self._idle.pop() if self._idle else _start()
            self._busy.add(worker)
            return worker

    def _drop(self, worker: "subprocess.Popen[bytes] | None") -> None:
        if worker is not None:
            worker.kill()
            worker.communicate()
            with self._lock:
                self._busy.discard(worker)


def _start() -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-P", str(Path(attempt.__file__))]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _compiles(worker: "subprocess.Popen[bytes]", question: bytes) -> bool:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(OSError):
        worker.stdin.write(question)
        worker.stdin.flush()
        ready, _, _ = select([worker.stdout], [], [], PATIENCE_S)
        return bool(ready) and worker.stdout.readline() == b"\n"
    return False
