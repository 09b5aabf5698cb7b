"""The sizes that steps are padded to, so that few graphs serve them all. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from compiled.program import SMALLEST

LARGEST_PIECES = 1024
"""Tokens from which on a GPU computes longer than its host launches: there padding costs more than graphs save."""


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """A size that steps are padded to. ``whole``: the pass is one graph, for ``tokens`` rows of one token each."""

    tokens: int
    whole: bool

    def __str__(self) -> str:
        return f"{'a graph of the whole pass' if self.whole else 'graphs of pieces'} for {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Buckets:
    """All sizes that there are, rising."""

    whole: tuple[int, ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, max_num_seqs: int, max_num_batched_tokens: int) -> "Buckets":
        """Few: each costs a capture, and half a step of distance costs a third of a step's work at most."""
        most = max(min(max_num_batched_tokens, LARGEST_PIECES), SMALLEST)
        return cls(tuple(_sizes(max(max_num_seqs, SMALLEST))), tuple(_sizes(most)))

    def fit(self, tokens: int, whole: bool) -> Bucket | None:
        """The smallest that holds so many; None: no graph is as large."""
        size = next((size for size in (self.whole if whole else self.pieces) if size >= tokens), None)
        return None if size is None else Bucket(size, whole)

    def first(self) -> tuple[Bucket, ...]:
        """Those to start with: the largest, which size the pool, and the one of a single answer."""
        return Bucket(self.pieces[-1], False), Bucket(self.whole[-1], True), Bucket(self.whole[0], True)


def _sizes(most: int) -> Iterator[int]:
    """1, 2, 4, 8, 16, then ×1.5 rounded up to a multiple of 8."""
    size = SMALLEST
    while size < most:
        yield size
        size = size * 2 if size < 16 else -(-size * 3 // 16) * 8
    yield most
