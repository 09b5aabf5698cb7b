"""What moves pages between engines. A transport belongs to one thread, the worker's, and decides nothing."""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from compiled.step import KVMemory


class TransportError(Exception):
    """What was asked for cannot be done here, or with that peer. One line."""


class Outcome(NamedTuple):
    """The end of a read: nothing writes into its pages any more. ``why`` is empty where all of them landed."""

    transfer: str
    why: str = ""


class Transport(Protocol):
    """Reads pages of other engines into this one's memory, and lets others read.

    A ``source`` is the memory of one start of another engine, by its incarnation. The memory of a source that is dead
    can still be read where a transport does not need it alive.
    """

    name: str
    version: str
    """Engines read from each other only if both are equal, see `Fingerprint`."""

    def register(self, memory: KVMemory) -> bytes:
        """Use ``memory`` from now on. Called once, first; the answer is for `connect` on the other side.

        Raises:
            TransportError: that memory cannot be reached so.
        """
        ...

    def connect(self, source: str, address: bytes) -> None:
        """Reads from ``source`` may follow. Once more after `forget` it is as if that had not been.

        Raises:
            TransportError: its memory cannot be reached, or is not of the shape of ours.
        """
        ...

    def read(self, transfer: str, source: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin to copy pages ``(of source, here)``; `poll` tells the end, exactly once, of this one too if it cannot
        begin. ``transfer`` is none that has not ended."""
        ...

    def poll(self) -> list[Outcome]:
        """Make some progress, for not much longer than a millisecond where that can be chosen; what has ended."""
        ...

    def pause(self) -> float | None:
        """Seconds until `poll` should be called again; None where nothing is to be done before the next call."""
        ...

    def expect(self) -> None:
        """Others may be about to read from here, where that needs our help."""
        ...

    def forget(self, source: str) -> None:
        """No new read will be of ``source``. What is in flight ends as it ends; then nothing is kept of it."""
        ...

    def close(self) -> None:
        """Nothing is written into our memory after this, nor reported of what was in flight. Twice is once."""
        ...


def check_pairs(pairs: Iterable[tuple[int, int]], theirs: int, ours: int) -> str:
    """Which of ``pairs`` lies outside of pools of so many pages; empty if none does."""
    for source, target in pairs:
        if not (0 <= source < theirs and 0 <= target < ours):
            return f"page {source} of {theirs} there cannot be page {target} of {ours} here"
    return ""


def checksums(memory: KVMemory, pages: Iterable[int]) -> tuple[int, ...]:
    """CRC-32 of each of ``pages``."""
    size = memory.page_bytes
    return tuple(zlib.crc32(memory.view[page * size : (page + 1) * size]) for page in pages)
