"""The bitmasks of a step: made by a thread of their own while the model runs, or when they are asked for where that is
cheaper."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from streamengine.guided.matcher import Bitmask, Place, Vocabulary

HANDOVER_S = 500e-6
"""What is over sooner costs more by a thread: waking it, and the interpreter's lock that goes to and fro. Asked for
after the model was launched, on a GPU it runs beside the model all the same."""


class PendingMasks:
    """See `compiled.step.Masks`."""

    def __init__(self, words: int, bitmask: Callable[[], Bitmask]) -> None:
        self.words = words
        self._bitmask = bitmask

    def wait(self) -> memoryview:
        return self._bitmask().data.cast("B")


class MaskMaker:
    """Owns one thread, which gives up the interpreter's lock while it computes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, "streamengine-masks")
        self._row_s = 0.0
        """What a row took of late."""

    def start(self, places: Sequence[Place], rows: int) -> PendingMasks:
        """``rows`` rows for ``places``, whose matchers must not move before `PendingMasks.wait`, which is once. Rows
        that no place has allow everything."""
        make = partial(self._make, tuple(places), rows)
        cheap = self._row_s * rows <= HANDOVER_S
        return PendingMasks(self._vocabulary.words, make if cheap else self._thread.submit(make).result)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make(self, places: tuple[Place, ...], rows: int) -> Bitmask:
        started = time.thread_time()
        bitmask = np.zeros((rows, self._vocabulary.words), np.int32)
        self._vocabulary.fill(places, bitmask)
        if sum(1 + len(drafts) for _, _, drafts in places) < rows:
            bitmask[~bitmask.any(axis=1)] = -1
        self._row_s += ((time.thread_time() - started) / rows - self._row_s) / 8
        return bitmask
