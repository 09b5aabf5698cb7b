"""Two engines' memories, workers and waits, for tests of what moves pages between them."""

import importlib.util
import mmap
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compiled.step import KVMemory
from streamengine.transfer.connection import listen
from streamengine.transfer.transport import Outcome, Transport
from streamengine.transfer.values import Card, Connected, Fingerprint, Order, Report
from streamengine.transfer.worker import Worker
from tests.fakes import memfd

WAIT_S = 20.0
POISON = 0xFF

PAGES, PAGE_BYTES = 64, 4096

NIXL = Path(__file__).resolve().parent.parent / ".nixl"
"""Where `make nixl` puts it."""


def no_nixl() -> str | None:
    """Why NIXL cannot be used; None if it can, and then ``import nixl`` finds it."""
    if NIXL.is_dir() and str(NIXL) not in sys.path:
        sys.path.append(str(NIXL))
    return None if importlib.util.find_spec("nixl") else "NIXL is not installed; get it with: make nixl"


def make_memory(pages: int = PAGES, page_bytes: int = PAGE_BYTES, seed: int | None = None) -> KVMemory:
    """In a memfd; random bytes, or all of them `POISON`. The descriptor is the caller's to close."""
    size = pages * page_bytes
    descriptor = memfd(size)
    view = memoryview(mmap.mmap(descriptor, size))
    draw = random.Random(seed)
    view[:] = b"".join(
        bytes([POISON]) * page_bytes if seed is None else draw.randbytes(page_bytes) for _ in range(pages)
    )
    return KVMemory(view, pages, page_bytes, descriptor)


@contextmanager
def memories(
    pages: int = PAGES, page_bytes: int = PAGE_BYTES, *, seeds: Sequence[int | None] = (1, None)
) -> Iterator[list[KVMemory]]:
    made = [make_memory(pages, page_bytes, seed) for seed in seeds]
    yield made
    for memory in made:
        assert memory.descriptor is not None
        os.close(memory.descriptor)


def page(memory: KVMemory, number: int) -> bytes:
    return bytes(memory.view[number * memory.page_bytes :][: memory.page_bytes])


def scattered(count: int, seed: int, pages: int = PAGES) -> tuple[tuple[int, int], ...]:
    """So many pairs of different pages in no order, none of them page 0, some of which follow each other."""
    draw = random.Random(seed)
    sources, targets = (draw.sample(range(1, pages), count) for _ in range(2))
    half = count // 2
    for numbers in (sources, targets):
        numbers[:half] = sorted(numbers[:half])
    return (*zip(sources, targets, strict=True),)


def until_ended(transport: Transport, count: int, *others: Transport, limit_s: float = WAIT_S) -> list[Outcome]:
    """Poll until ``count`` reads have ended; ``others`` make progress too."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + limit_s
    while len(outcomes) < count:
        assert time.monotonic() < deadline, f"{len(outcomes)} of {count} reads ended"
        for other in others:
            other.poll()
        outcomes += transport.poll()
    return outcomes


def fingerprint(transport: Transport, **changed: object) -> Fingerprint:
    facts: dict[str, object] = {
        "model": "test", "compute": "float32", "dtype": "float32", "page_size": 4, "page_bytes": PAGE_BYTES,
        "layers": 1, "layout": "1 of 1 x 8, 1 x 8",
        "transport": transport.name, "transport_version": transport.version,
    }  # fmt: skip
    return Fingerprint(**{**facts, **changed})  # type: ignore[arg-type]


def card(transport: Transport, engine: str, incarnation: str | None = None, **changed: object) -> Card:
    return Card(engine=engine, incarnation=incarnation or f"{engine}-1", fingerprint=fingerprint(transport, **changed))


@dataclass
class Core:
    """Stands where a core does: posts orders, waits for reports in `select`."""

    worker: Worker
    seen: list[Report] = field(default_factory=list)

    def post(self, *orders: Order) -> None:
        self.worker.post(orders)

    def until(self, wanted: Callable[[Report], bool] | type, limit_s: float = WAIT_S) -> Report:
        """The first report of those not looked at yet that is ``wanted``; what came before it is dropped."""
        matches = (lambda report: isinstance(report, wanted)) if isinstance(wanted, type) else wanted
        deadline = time.monotonic() + limit_s
        while True:
            while self.seen:
                report = self.seen.pop(0)
                if matches(report):
                    return report
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.worker.fileno()], [], [], left)[0], "no such report"
            self.seen += self.worker.poll()

    def connected(self) -> Connected:
        report = self.until(Connected)
        assert isinstance(report, Connected)
        return report

    def quiet(self) -> None:
        """Nothing was reported that was not looked at."""
        assert [*self.seen, *self.worker.poll()] == []


@contextmanager
def core(
    transport: Transport,
    memory: KVMemory,
    engine: str,
    *,
    incarnation: str | None = None,
    listen_at: str | None = None,
    peers: Sequence[str] = (),
    key: str | None = None,
    **changed: object,
) -> Iterator[Core]:
    listener = None if listen_at is None else listen(listen_at)
    worker = Worker(
        card(transport, engine, incarnation, **changed), memory, transport, listener=listener, peers=peers, key=key
    )
    try:
        yield Core(worker)
    finally:
        worker.close()


def socket_path(folder: Path) -> str:
    path = folder / "p"
    assert len(os.fspath(path)) < 100, "too long for a unix socket"
    return f"unix:{path}"
