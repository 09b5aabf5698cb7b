"""Counter-based random numbers: Philox4x32-10 in numpy.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). On the host, where seeds and positions
are, so that every device draws with the same numbers.
"""

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_LOW = np.array(0xFFFFFFFF, np.uint64)
_HALF = np.array(32, np.uint64)


def uniform(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) for each (seed, position), both int64: keyed by the seed, counting positions."""
    keys = _halves(seeds_R) + _KEY_STEPS & _LOW
    # The counter's words 0 and 2 are multiplied in each round, words 1 and 3 are not; the position is words 0 and 1.
    position = _halves(positions_R)
    even, odd = position * _FIRST, position[::-1] * _FIRST
    for key in keys:
        product = even * _MULTIPLIERS
        even, odd = (product >> _HALF)[::-1] ^ odd ^ key, (product & _LOW)[::-1]
    # 53 bits: the upper 27 of word 0, then the upper 26 of word 1.
    mantissa = (even[0] >> np.uint64(5) << np.uint64(26)) | (odd[0] >> np.uint64(6))
    return mantissa.astype(np.float64) / 2**53


def _halves(values_R: np.ndarray) -> np.ndarray:
    """Low and high 32 bits: ``[2, R]``."""
    bits = values_R.astype(np.int64).view(np.uint64)
    return np.stack([bits & _LOW, bits >> _HALF])


_FIRST = np.array([[1], [0]], np.uint64)
