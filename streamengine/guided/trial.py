"""Whether a grammar compiles within bounds, tried where it can be stopped.

The grammar engine bounds what it does by fuel of its own, except where regular expressions are intersected: thirty
small patterns in an ``allOf`` keep its constructor busy for ever, at a hundred megabytes a second, in a thread that
nothing can end. So whatever has expressions of a client's is first compiled in a process with limits. It says
nothing but that it has come to an end; what is wrong with a grammar the real compile tells.
"""

import resource
import subprocess
import sys
import time
from contextlib import suppress
from math import ceil
from select import select
from threading import Lock

import msgspec

from streamengine.errors import GrammarError
from streamengine.guided import tools
from streamengine.guided.grammar import Grammar

CPU_S = 4
MEMORY_BYTES = 2 * 2**30
"""Of the process's addresses; it begins with a quarter of that."""

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
        """Raises GrammarError: it would take too much time or memory to compile."""
        if not _has_expressions(grammar):
            return
        worker = self._take()
        if worker is None or not _compiles(worker, grammar):
            self._drop(worker)
            raise GrammarError(f"it would take more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to compile")
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


def _has_expressions(grammar: Grammar) -> bool:
    """A schema without patterns holds none but the engine's own."""
    return grammar.kind in ("regex", "lark") or '"pattern' in grammar.text


def _start() -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-m", "streamengine.guided.trial"]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _compiles(worker: "subprocess.Popen[bytes]", grammar: Grammar) -> bool:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(OSError):
        worker.stdin.write(msgspec.json.encode(grammar) + b"\n")
        worker.stdin.flush()
        ready, _, _ = select([worker.stdout], [], [], PATIENCE_S)
        return bool(ready) and worker.stdout.readline() == b"\n"
    return False


def main() -> None:
    """Answer each line, which is a grammar, by an empty one; or die."""
    # Not before the limits: they count what numpy and the engine map.
    from streamengine.guided.matcher import Vocabulary

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = Vocabulary.of_bytes()
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=Grammar)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(time.process_time()) + CPU_S, hard))
        for one in _parts(grammar):
            with suppress(GrammarError):
                vocabulary.compile(one)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


def _parts(grammar: Grammar) -> list[Grammar]:
    """Markup of tools names tokens that only the model has; their schemas do not."""
    if grammar.kind != "tools":
        return [grammar]
    return [Grammar(kind="json_schema", text=text) for _, text in tools.schemas_of(grammar)]


if __name__ == "__main__":
    main()
