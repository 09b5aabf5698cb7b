"""Reads that are memory copies by this thread, a few at a time: what transports on one machine have in common.

A copy needs nobody's help, so a read does not fail once its source is mapped, whatever becomes of the other engine:
what it computed stays in the memory that we hold.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from compiled.step import KVMemory
from streamengine.transfer.transport import Outcome, TransportError, check_pairs

SLICE_S = 0.001
"""So long may one `poll` copy before the owner of the thread looks at its sockets."""

SLICE_BYTES = 4 * 2**20
"""And so much at a time."""

Pages = NDArray[np.uint8]


@dataclass(slots=True)
class _Source:
    pages: Pages
    forgotten: bool = False
    reads: int = 0


@dataclass(slots=True)
class _Copy:
    transfer: str
    source: str
    runs: deque[tuple[int, int, int]]


@dataclass(eq=False)
class Copying(ABC):
    """See `Transport`. Reads run one after the other; how a source is mapped is for subclasses."""

    _ours: Pages = field(default_factory=lambda: np.zeros((0, 0), np.uint8), init=False)
    _sources: dict[str, _Source] = field(default_factory=dict, init=False)
    _copies: deque[_Copy] = field(default_factory=deque, init=False)
    _refused: list[Outcome] = field(default_factory=list, init=False)

    def use(self, memory: KVMemory) -> None:
        """``memory`` is where pages land."""
        self._ours = rows(memory)

    @abstractmethod
    def map(self, address: bytes) -> Pages:
        """All pages of the memory at ``address``, for reading. Raises TransportError."""

    def connect(self, source: str, address: bytes) -> None:
        if known := self._sources.get(source):
            known.forgotten = False
            return
        pages = self.map(address)
        if pages.shape[1] != self._ours.shape[1]:
            raise TransportError(f"a page there has {pages.shape[1]} bytes, here {self._ours.shape[1]}")
        self._sources[source] = _Source(pages)

    def read(self, transfer: str, source: str, pairs: Sequence[tuple[int, int]]) -> None:
        known = self._sources.get(source)
        if known is None or known.forgotten:
            self._refused.append(Outcome(transfer, f"the memory of {source} is not mapped"))
        elif why := check_pairs(pairs, len(known.pages), len(self._ours)):
            self._refused.append(Outcome(transfer, why))
        else:
            known.reads += 1
            most = max(1, SLICE_BYTES // self._ours.shape[1])
            self._copies.append(_Copy(transfer, source, deque(_runs(pairs, most))))

    def poll(self) -> list[Outcome]:
        outcomes, self._refused = self._refused, []
        until = time.perf_counter() + SLICE_S
        while self._copies:
            copy = self._copies[0]
            theirs = self._sources[copy.source].pages
            while copy.runs and time.perf_counter() < until:
                source, target, count = copy.runs.popleft()
                # Without the interpreter's lock, which may be milliseconds away again afterwards: hence runs.
                self._ours[target : target + count] = theirs[source : source + count]
            if copy.runs:
                break
            self._copies.popleft()
            outcomes.append(Outcome(copy.transfer))
            self._sources[copy.source].reads -= 1
            self._drop(copy.source)
        return outcomes

    def pause(self) -> float | None:
        return 0.0 if self._copies or self._refused else None

    def expect(self) -> None:
        """Nobody needs our help to read."""

    def forget(self, source: str) -> None:
        if known := self._sources.get(source):
            known.forgotten = True
            self._drop(source)

    def _drop(self, source: str) -> None:
        known = self._sources[source]
        if known.forgotten and not known.reads:
            del self._sources[source]

    def close(self) -> None:
        self._copies.clear()
        self._sources.clear()


def _runs(pairs: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int, int]]:
    """``pairs`` as ``(source, target, count)``: at most ``most`` that follow each other on both sides are one."""
    begin = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[begin]
        ahead = end - begin
        if end == len(pairs) or ahead == most or pairs[end] != (source + ahead, target + ahead):
            yield source, target, ahead
            begin = end


def rows(memory: KVMemory) -> Pages:
    """``[pages, page_bytes]`` over the same bytes."""
    return np.frombuffer(memory.view, np.uint8).reshape(memory.pages, memory.page_bytes)
