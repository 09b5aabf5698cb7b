"""Bitmasks on logits: the kernel does what plain numpy does, on any number of rows and of tokens."""

import os

import numpy as np
import pytest

from compiled import bars


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """``make asan`` has it built with other flags."""
    flags = os.environ.get("KERNEL_FLAGS")
    bars.load_kernel(flags=tuple(flags.split())) if flags else bars.load_kernel()


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 45, 96, 300])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_kernel_bars_the_tokens_that_plain_numpy_bars(
    vocabulary: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.random.default_rng(vocabulary)
    bits = source.integers(0, 256, (rows, 4 * -(-vocabulary // 32) + 4), np.uint8)
    bits[source.random(bits.shape) < 0.5] = 0xFF
    masks = source.integers(-1, rows, rows)
    before = source.standard_normal((rows + 1, vocabulary), np.float32)
    before[source.random(before.shape) < 0.1] = np.nan
    expected, found = before.copy(), before.copy()
    bars.bar(found[:rows], masks, bits)
    monkeypatch.setattr(bars, "_kernel", None)
    bars.bar(expected[:rows], masks, bits)
    np.testing.assert_array_equal(found, expected)
    allowed = np.unpackbits(bits, axis=1, count=vocabulary, bitorder="little").astype(bool)[masks]
    allowed[masks < 0] = True
    assert (found[:rows][~allowed] == -np.inf).all()
    np.testing.assert_array_equal(found[:rows][allowed], before[:rows][allowed])
    np.testing.assert_array_equal(found[rows], before[rows])
