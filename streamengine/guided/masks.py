"""The bitmasks of a step: made at once where that is cheap, else by a thread of their own while the model runs."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from streamengine.guided.matcher import Bitmask, Place, Vocabulary

HANDOVER_S = 500e-6
"""What is over sooner costs more by a thread: waking it, and the interpreter's lock that goes to and fro."""


class PendingMasks:
    """See `compiled.step.Masks`."""

    def __init__(self, words: int, bitmask: "Future[Bitmask] | Bitmask") -> None:
        self.words = words
        self._bitmask = bitmask

    def wait(self) -> memoryview:
        bitmask = self._bitmask.result() if isinstance(self._bitmask, Future) else self._bitmask
        return bitmask.data.cast("B")


class MaskMaker:
    """Owns one thread, which gives up the interpreter's lock while it computes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, "streamengine-masks")
        self._row_s = 0.0
        """What a row of the last bitmasks took, recent ones most."""

    def start(self, places: Sequence[Place], rows: int) -> PendingMasks:
        """Begin with ``rows`` rows for ``places``, whose matchers must not move before `PendingMasks.wait`. Rows that
        no place has allow everything."""
        if self._row_s * rows <= HANDOVER_S:
            return PendingMasks(self._vocabulary.words, self._make(places, rows))
        return PendingMasks(self._vocabulary.words, self._thread.submit(self._make, tuple(places), rows))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make(self, places: Sequence[Place], rows: int) -> Bitmask:
        started = time.thread_time()
        bitmask = np.zeros((rows, self._vocabulary.words), np.int32)
        self._vocabulary.fill(places, bitmask)
        if sum(1 + len(drafts) for _, _, drafts in places) < rows:
            bitmask[~bitmask.any(axis=1)] = -1
        self._row_s += ((time.thread_time() - started) / rows - self._row_s) / 8
        return bitmask
