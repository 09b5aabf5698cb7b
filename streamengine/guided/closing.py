"""How few tokens would complete an answer: what ``close_document`` steers to when the budget runs out. Pure.

A search over matchers. Where a grammar leaves a choice, few tokens are tried: those that close something, the
shortest values, and where neither may come one for each letter that may. Of these, one is as good as another after
which the same may come, and last is what leaves everything as it was: so a pattern's parts are passed through one after
the other. The length found is that of a completion, short but not proven the shortest.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

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
"""Tokens of a kind that are tried."""

TRIED_AT_ONCE = 10
"""Those looked at that count as a state."""

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
        self._ascii = np.array([text.isascii() and bool(text) for text in texts])
        letters: dict[bytes, int] = {}
        for token in np.argsort(self._lengths, kind="stable").tolist():
            if self._ascii[token]:
                letters.setdefault(texts[token][:1], token)
        self._ink = self._ascii & np.array([not text[:1].isspace() for text in texts])
        """Between JSON's tokens nothing is gained by blanks."""
        self._structure = frozenset(letters[letter] for letter in (b"{", b"[") if letter in letters)
        self._letters = [letters[letter] for letter in sorted(letters, key=lambda letter: (letter.isalnum(), letter))]

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
        seen: dict[bytes, None] = {}
        # Whoever left the most promising way least often goes first, and of these who is furthest.
        heap = [(0, -len(tokens), next(order), there, tokens) for there, tokens in starts]
        heapify(heap)
        while heap and states > 0:
            strayed, _, _, here, tokens = heappop(heap)
            steps, cost = self._steps(here, seen)
            states -= cost
            for rank, step in enumerate(steps):
                path = [*tokens, *step]
                rank += len(path) > STUTTER and len(set(path[-STUTTER:])) == 1
                if len(path) > most:
                    continue
                there = here.copy()
                if step[-1] in self._ends or (all(there.advance(token) for token in step) and there.stopped):
                    best, most, states = path, len(path) - 1, min(states, improve)
                elif there.accepting and len(self._ends) and len(path) < most:
                    best, most, states = [*path, int(self._ends[0])], len(path), min(states, improve)
                elif not there.error:
                    heappush(heap, (strayed + rank, -len(path), next(order), there, path))
        return best

    def _steps(self, matcher: Matcher, seen: dict[bytes, None]) -> tuple[list[list[int]], int]:
        """Ways on, the most promising first; and how many states this counts for. ``seen``: the search's bitmasks, of
        which the last is the latest."""
        if matcher.accepting and len(self._ends):
            return [[int(self._ends[0])]], 1
        if forced := matcher.forced():
            return [forced], 1
        bits = self._bits(matcher)
        seen.pop(bits.tobytes(), None)
        seen[bits.tobytes()] = None
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)[: len(self._lengths)]
        preferred = self._preferred[allowed[self._preferred]][:TRIED].tolist()
        if any(self._closes(matcher, token, bits) for token in preferred if token in self._closing):
            return [[token] for token in preferred], 1
        plain = allowed & (self._ink if self._structure.intersection(preferred) else self._ascii)
        others = np.flatnonzero(plain if plain.any() else allowed)
        by_length = others[np.argsort(-self._lengths[others], kind="stable")].tolist()
        letters = [token for token in self._letters if plain[token]] or by_length[: -TRIED - 1 : -1]
        tried = list(dict.fromkeys([*preferred[:1], *letters, *preferred[1:], *by_length[:TRIED]]))
        steps = [[token] for token in self._unlike(matcher, tried, bits.tobytes(), seen)]
        return steps, 1 + len(tried) // TRIED_AT_ONCE

    def _closes(self, matcher: Matcher, token: int, bits: NDArray[np.uint8]) -> bool:
        """Not within free text, where brackets are letters like others."""
        there = matcher.copy()
        return there.advance(token) and (there.stopped or not np.array_equal(self._bits(there), bits))

    def _unlike(self, matcher: Matcher, tokens: Sequence[int], before: bytes, seen: dict[bytes, None]) -> list[int]:
        """One of those after which the same may come: where the search has not been for longest first, what changes
        nothing (``before``) last, of which the longest is the faster way through what is counted."""
        ending: list[int] = []
        kinds: dict[bytes, int] = {}
        same: list[int] = []
        for token in tokens:
            there = matcher.copy()
            if not there.advance(token):
                continue
            if there.stopped or (there.accepting and len(self._ends)):
                ending.append(token)
            elif (after := self._bits(there).tobytes()) == before:
                same.append(token)
            else:
                kinds.setdefault(after, token)
        visits = {after: number for number, after in enumerate(seen)}
        ways = [kinds[after] for after in sorted(kinds, key=lambda after: visits.get(after, -1))]
        same.sort(key=lambda token: -int(self._lengths[token]))
        return [*ending[:TRIED], *ways, *dict.fromkeys([*same[:1], *same[-1:]])]

    def _bits(self, matcher: Matcher) -> NDArray[np.uint8]:
        """The bitmask of what may come next."""
        bitmask = np.zeros((1, self._vocabulary.words), np.int32)
        self._vocabulary.fill([(matcher, 0, ())], bitmask)
        return bitmask.view(np.uint8)[0]


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
