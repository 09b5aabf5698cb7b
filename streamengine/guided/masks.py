"""The bitmasks of a step, made by a thread of their own while the model runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from streamengine.guided.matcher import Bitmask, Place, Vocabulary


class PendingMasks:
    """See `compiled.step.Masks`."""

    def __init__(self, words: int, bitmask: "Future[Bitmask]") -> None:
        self.words = words
        self._bitmask = bitmask

    def wait(self) -> memoryview:
        return self._bitmask.result().data.cast("B")


class MaskMaker:
    """Owns one thread, which gives up the interpreter's lock while it computes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, "streamengine-masks")

    def start(self, places: Sequence[Place], rows: int) -> PendingMasks:
        """Begin with ``rows`` rows for ``places``, whose matchers must not move before `PendingMasks.wait`. Rows that
        no place has allow everything."""
        return PendingMasks(self._vocabulary.words, self._thread.submit(self._make, tuple(places), rows))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make(self, places: tuple[Place, ...], rows: int) -> Bitmask:
        bitmask = np.zeros((rows, self._vocabulary.words), np.int32)
        self._vocabulary.fill(places, bitmask)
        if sum(1 + len(drafts) for _, _, drafts in places) < rows:
            bitmask[~bitmask.any(axis=1)] = -1
        return bitmask
