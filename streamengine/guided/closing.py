"""How few tokens would complete an answer: what ``close_document`` steers to when the budget runs out. Pure.

A search over matchers. Where a grammar leaves a choice, few tokens are tried: those that close something, the
shortest values, and where neither may come the longest and the shortest of what may. So the length found is
that of a completion, short but not proven the shortest.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from streamengine.guided.matcher import Matcher, Vocabulary

MAX_STATES = 3000
"""Matchers that one search may look at, while nobody waits for it."""

STATES_TO_IMPROVE = 200
"""And after it found a completion, for a shorter one."""

STATES_AT_ONCE = 100
"""While a step waits: a millisecond for each. From a completion of a moment ago it takes few of them."""

SLACK = 64
LOOK_EVERY = 16

STUTTER = 16
"""A token so many times in a row leads nowhere, as zeros behind a point where the number may not be zero."""

TRIED = 6
"""Tokens that are tried where nothing can be closed."""

_CLOSERS = frozenset(b'"]}')
_GROUPS = (
    (b'""', b'"', b"}", b"]"),
    # Closers of several kinds at once come here. Then what ends a number comes before what would lengthen it.
    # One before zero: a year 0 is a date in JSON Schema, but not in every language.
    (b",", b":", b"null", b"[]", b"{}", b"1", b"0", b"true", b"n", b"t", b"-", b"[", b"{"),
)
_SIMPLE = frozenset(text for group in _GROUPS for text in group)


class Closer:
    """Finds completions in one vocabulary; threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        size = vocabulary.tokenizer.vocab_size
        texts = [vocabulary.tokenizer.decode_bytes([token]) for token in range(size)]
        self._lengths = np.array([len(text) for text in texts])
        closers = [t for t in range(size) if len(texts[t]) > 1 and _CLOSERS.issuperset(texts[t])]
        simple = {text: token for token, text in reversed(list(enumerate(texts))) if text in _SIMPLE}
        first, *others = ([simple[text] for text in group if text in simple] for group in _GROUPS)
        self._preferred = np.array([*first, *closers, *(token for group in others for token in group)], np.int64)
        self._closing = frozenset([*first, *closers, *(simple[text] for text in (b",", b":") if text in simple)])
        self._ends = np.array(vocabulary.tokenizer.eos_tokens, np.int64)

    def shortest(self, matcher: Matcher, most: int) -> list[int] | None:
        """Tokens that complete the answer, at most ``most``; an end-of-sequence token where the grammar allows one and
        does not end by itself. None if none were found."""
        return self._search([(matcher.copy(), [])], most, MAX_STATES, STATES_TO_IMPROVE)

    def first(self, matcher: Matcher, most: int, hint: Sequence[int], states: int) -> list[int] | None:
        """The same, but the first found will do. ``hint`` completed the answer when it was a little shorter."""
        starts = [(matcher.copy(), list[int]())]
        for skipped in range(min(len(hint), 2)):  # what was taken may have been its first token
            if tokens := list(hint[skipped:][: matcher.valid(hint[skipped:])])[:most]:
                there = matcher.copy()
                whole = tokens[-1] in self._ends
                if all(there.advance(token) for token in tokens[: len(tokens) - whole]) and (whole or there.stopped):
                    return tokens
                starts.append((there, tokens))
        return self._search(starts, most, states, 0)

    def _search(
        self, starts: Sequence[tuple[Matcher, list[int]]], most: int, states: int, improve: int
    ) -> list[int] | None:
        best: list[int] | None = None
        order = count()
        # Whoever left the most promising way least often goes first, and of these who is furthest.
        heap = [(0, -len(tokens), next(order), there, tokens) for there, tokens in starts]
        heapify(heap)
        while heap and states > 0:
            states -= 1
            strayed, _, _, here, tokens = heappop(heap)
            for rank, step in enumerate(self._steps(here)):
                path = [*tokens, *step]
                rank += len(path) > STUTTER and len(set(path[-STUTTER:])) == 1
                if len(path) > most:
                    continue
                there = here.copy()
                if step[-1] in self._ends or (all(there.advance(token) for token in step) and there.stopped):
                    best, most, states = path, len(path) - 1, min(states, improve)
                elif not there.error:
                    heappush(heap, (strayed + rank, -len(path), next(order), there, path))
        return best

    def _steps(self, matcher: Matcher) -> Iterator[list[int]]:
        """Ways on, the most promising first."""
        if matcher.accepting and len(self._ends):
            yield [int(self._ends[0])]
            return
        if forced := matcher.forced():
            yield forced
            return
        bitmask = np.zeros((1, self._vocabulary.words), np.int32)
        self._vocabulary.fill([(matcher, 0, ())], bitmask)
        allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little").astype(bool)[: len(self._lengths)]
        preferred = self._preferred[allowed[self._preferred]][:TRIED].tolist()
        if not self._closing.isdisjoint(preferred):
            yield from ([token] for token in preferred)
            return
        # What begins with a digit may need a letter to end, as a duration does.
        others = np.flatnonzero(allowed)
        by_length = others[np.argsort(-self._lengths[others], kind="stable")].tolist()
        tried = [*preferred[:1], *by_length[: -TRIED - 1 : -1], *preferred[1:], *by_length[:TRIED]]
        yield from ([token] for token in dict.fromkeys(tried))


class Steering:
    """Watches one answer's budget. Between two looks an answer is trusted not to open more than `SLACK` tokens close;
    so looks are rare while there is room, and come at every step when there is not. ``ending`` completes the answer at
    its beginning."""

    def __init__(self, closer: Closer, ending: Sequence[int]) -> None:
        self._closer = closer
        self._ending = list(ending)
        self._unseen = 0

    def fork(self) -> "Steering":
        other = Steering(self._closer, self._ending)
        other._unseen = self._unseen
        return other

    def check(self, matcher: Matcher, taken: int, left: int) -> tuple[int, list[int]] | None:
        """``taken`` tokens were just taken and ``left`` more are allowed. None: go on.

        Otherwise the answer can only be completed without the last ``drop`` of these, by the tokens given.
        """
        self._unseen += taken
        if left > 2 * len(self._ending) + SLACK and self._unseen < LOOK_EVERY:
            return None
        ending = self._closer.first(matcher, left, self._ending, STATES_AT_ONCE)
        if ending is not None:
            self._ending, self._unseen = ending, 0
            return None
        if self._unseen == taken:  # the last look was before these
            return taken, self._ending
        back = matcher.copy()
        for drop in range(1, taken + 1):
            back.rollback(1)
            ending = self._closer.first(back, left + drop, self._ending, STATES_AT_ONCE)
            if ending is not None:
                return drop, ending
        return None  # it opened more than it was trusted with: max_tokens will cut it
