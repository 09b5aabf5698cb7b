"""Guesses at the tokens that come next, looked up in the request's own text. Pure.

Prompt look-up (n-gram) speculation: where the last tokens occurred before, what followed there is likely to
follow here. A guess costs a place in a step that runs anyway and can never change an answer: each token is
sampled by the model as ever, and a guess only decides whether the next one was computed on the right tokens already.
"""

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2
"""Tokens that must have occurred before; the longest match wins, then the latest."""


class Lookup:
    """The n-grams of one sequence, whose tokens are only ever appended."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may follow ``tokens``; a loop is guessed to go on."""
        length = len(tokens)
        for place in range(max(self._indexed, SHORTEST), length):
            for n in range(SHORTEST, min(LONGEST, place) + 1):
                self._behind[tuple(tokens[place - n : place])] = place
        self._indexed = length
        for n in range(LONGEST, SHORTEST - 1, -1):
            found = self._behind.get(tuple(tokens[-n:]))
            if found is not None:
                return tuple(tokens[found + i % (length - found)] for i in range(most))
        return ()


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many ``drafts`` were right; ``sampled[i]`` was computed on those before ``drafts[i]``."""
    for count, (draft, token) in enumerate(zip(drafts, sampled, strict=False)):
        if draft != token:
            return count
    return len(drafts)
