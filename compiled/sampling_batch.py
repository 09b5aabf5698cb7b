"""The sampling options of a step's logit rows as arrays, flattened once on the host.

Rows are sorted by what is to be done with them and cut into parts of few rows, so that the sampler's temporaries stay
in the cache, whatever the size of the step. Edits are lists of (row, token id): their size is that of the options, not
of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import attrgetter

import numpy as np

from compiled.philox import uniform
from compiled.step import Row, Sampling

ROWS_AT_ONCE = 16
_OPTIONS = attrgetter("temperature", "top_k", "top_p", "min_p", "typical_p")


class Kind(IntEnum):
    """What is done with a row's edited logits."""

    GREEDY = 0
    WHOLE = 1  # drawn from the whole distribution
    CUT = 2  # drawn from what min_p, top_k, top_p and typical_p leave of it


@dataclass(frozen=True, slots=True)
class Entries:
    """Token ids of some rows, ordered by row: ``rows`` and ``ids`` [E], ``values`` [.., E] theirs."""

    rows: np.ndarray
    ids: np.ndarray
    values: np.ndarray

    def flat(self, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices into flattened logits ``[N, vocabulary]``, and the values. Ids that are not sampled (padding of the
        model's head) are left out."""
        there = self.ids < vocabulary
        return (self.rows * vocabulary + self.ids)[there], self.values[..., there]


@dataclass(frozen=True, slots=True)
class Edits:
    """What is done to a part's logits, in this order; None: nothing. See `Sampling`.

    ``bias`` has one value an entry, the addend; ``seen`` two, the repetition penalty and the sum of presence and
    frequency penalties. ``masks`` [N] are rows of the step's grammar bitmask, -1 where there is none.
    """

    allowed: Entries | None = None
    barred: Entries | None = None
    bias: Entries | None = None
    seen: Entries | None = None
    masks: np.ndarray | None = None

    @property
    def lists(self) -> bool:
        """Whether any of them is there, ``masks`` aside."""
        return any(one is not None for one in (self.allowed, self.barred, self.bias, self.seen))


@dataclass(frozen=True, slots=True)
class Part:
    """N ≤ `ROWS_AT_ONCE` rows of one kind: ``rows`` [N] are their logit rows, rising; the others are options [N], in
    float64. ``uniform`` are their random numbers.
    """

    kind: Kind
    rows: np.ndarray
    edits: Edits | None
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    typical_p: np.ndarray
    uniform: np.ndarray


def prepare(rows: Sequence[Row], draw_at: np.ndarray, masks: np.ndarray | None = None) -> tuple[Part, ...]:
    """All logit rows that are sampled. ``rows[i]`` owns the i-th, which gives the token at position ``draw_at[i]``: a
    row with drafts comes once for each of its tokens. All have a sampling. ``masks[i]`` is its row in the step's
    bitmask, or -1."""
    samplings = list(map(attrgetter("sampling"), rows))
    if not samplings:
        return ()
    options = np.zeros((6, len(rows)))
    kinds = np.full(len(rows), Kind.GREEDY)
    if any(map(attrgetter("temperature"), samplings)):
        options[:5] = np.fromiter(chain.from_iterable(map(_OPTIONS, samplings)), np.float64).reshape(-1, 5).T
        kinds = _kinds(*options[:5])
        options[5] = uniform(np.fromiter(map(attrgetter("seed"), samplings), np.int64), draw_at)
    listed = np.fromiter(map(attrgetter("edits"), samplings), bool)
    edited = listed if masks is None else listed | (masks >= 0)
    parts = []
    alike = 2 * kinds + edited
    for kind in sorted(set(alike.tolist())):
        (members,) = (alike == kind).nonzero()
        for start in range(0, len(members), ROWS_AT_ONCE):
            few = members[start : start + ROWS_AT_ONCE]
            edits = None
            if kind % 2:
                edits = Edits(masks=None if masks is None or masks[few].max() < 0 else masks[few])
                if listed[few].any():
                    of_few = [rows[i] for i in few], [samplings[i] for i in few], draw_at[few].tolist()
                    edits = _listed(*of_few, edits.masks)
            parts.append(Part(Kind(kind // 2), few, edits, *options[:, few]))
    return tuple(parts)


def _kinds(
    temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, typical_p: np.ndarray
) -> np.ndarray:
    cut = (top_k != 0) | (top_p < 1) | (min_p != 0) | (typical_p < 1)
    return np.where(temperature == 0, Kind.GREEDY, np.where(cut, Kind.CUT, Kind.WHOLE))


def _listed(
    rows: Sequence[Row], samplings: Sequence[Sampling], lengths: Sequence[int], masks: np.ndarray | None
) -> Edits:
    """``lengths[i]`` tokens precede the one that row i gives."""
    biases = [s.logit_bias for s in samplings]
    return Edits(
        allowed=_entries([s.allowed_token_ids for s in samplings]),
        barred=_entries([_barred(*row) for row in zip(rows, samplings, lengths, strict=True)]),
        bias=_entries([[token for token, _ in bias] for bias in biases], [addend for _, addend in chain(*biases)]),
        seen=_seen(rows, samplings, lengths),
        masks=masks,
    )


def _barred(row: Row, sampling: Sampling, length: int) -> list[int]:
    """The ids that would complete a bad word, and those that are barred until the answer is long enough."""
    barred = [
        word[-1]
        for word in sampling.bad_words
        if len(word) <= length + 1 and row.history[length + 1 - len(word) : length] == word[:-1]
    ]
    if length - row.prompt_length < sampling.min_tokens:
        barred += sampling.barred_token_ids
    return barred


def _entries(ids: Sequence[Sequence[int]], values: Sequence[float] = ()) -> Entries | None:
    lengths = [len(of_row) for of_row in ids]
    total = sum(lengths)
    if not total:
        return None
    return Entries(
        np.repeat(np.arange(len(ids)), lengths),
        np.fromiter(chain.from_iterable(ids), np.int64, total),
        np.array([values], np.float32) if values else np.empty((0, total), np.float32),
    )


def _seen(rows: Sequence[Row], samplings: Sequence[Sampling], lengths: Sequence[int]) -> Entries | None:
    """The tokens of penalised rows, each once, with the penalties."""
    histories = [
        row.history[:length] if s.penalises else () for row, s, length in zip(rows, samplings, lengths, strict=True)
    ]
    every = _entries(histories)
    if every is None:
        return None
    sizes = [len(history) for history in histories]
    position = np.arange(len(every.ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    answered = position >= np.array([row.prompt_length for row in rows])[every.rows]
    keys, inverse = np.unique(every.rows << 32 | every.ids, return_inverse=True)
    counts = np.bincount(inverse, weights=answered, minlength=len(keys))
    owners = keys >> 32
    penalties = np.array([(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplings])
    repetition, presence, frequency = penalties.T[:, owners]
    subtracted = presence * (counts > 0) + frequency * counts
    return Entries(owners, keys & 0xFFFFFFFF, np.stack([repetition, subtracted]).astype(np.float32))
