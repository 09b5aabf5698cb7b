"""What grammars bar, in logits in the CPU's memory: a bitmask's zeros become -inf."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from compiled.native import FLAGS, load_library

_SOURCES = (Path(__file__).with_suffix(".cpp"),)

_kernel: Callable[..., None] | None = None


@cache
def load_kernel(folder: Path | None = None, flags: Sequence[str] = FLAGS) -> None:
    """Let `bar` be the machine's own code, compiled first if ``folder`` does not have it (see `compiled.native`).

    Raises `compiled.native.KernelUnavailable`.
    """
    global _kernel
    _kernel = load_library(_SOURCES, folder, flags=flags).bar
    _kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
    _kernel.restype = None


def bar(logits_NV: np.ndarray, masks_N: np.ndarray, bits_MB: np.ndarray) -> None:
    """In place. ``logits_NV`` is float32 and contiguous, ``bits_MB`` uint8 with bit ``i % 8`` of byte ``i // 8`` for
    token i, a whole number of 32-bit words a row; ``masks_N`` int64 are the rows' rows in it, -1 for none."""
    rows, vocabulary = logits_NV.shape
    assert logits_NV.flags.c_contiguous and bits_MB.flags.c_contiguous and masks_N.flags.c_contiguous
    assert bits_MB.shape[1] >= 4 * -(-vocabulary // 32), "a bit for each token"
    if _kernel is None:
        (barred,) = (masks_N >= 0).nonzero()
        allowed = np.unpackbits(bits_MB[masks_N[barred]], axis=1, count=vocabulary, bitorder="little")
        logits_NV[barred] = np.where(allowed, logits_NV[barred], np.float32(-np.inf))
        return
    _kernel(logits_NV.ctypes.data, masks_N.ctypes.data, bits_MB.ctypes.data, rows, vocabulary, bits_MB.shape[1])
