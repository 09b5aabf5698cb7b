"""`compiled.sampler` for logits on an accelerator: the same tokens, without ever waiting for the device.

All that the host knows (options, places of edits, random numbers) travels with the step's inputs; what it would have
to look at is computed for all rows instead: every row is rescued, though few need it, and candidates are those that any
row could have. The token before the one that is drawn may still be in flight: what depends on it is computed on the
device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from compiled.draw import draw_whole, find, keep
from compiled.gpu.staging import Parcel
from compiled.sampler import ADDENDS, bars, others, rescue, usable
from compiled.sampling_batch import Entries, Kind, Part
from compiled.step import Row

_FEW = 1024
"""Rows whose top_k is at most this have that many candidates, which are found without sorting the vocabulary."""

_ROWS_AT_ONCE = 32
"""Of those whose whole vocabulary is cut: what that takes beside is a dozen times their logits."""

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and width of the digits of a positive float32's bits, which order as it does."""

_UNIT = 2.0**61
"""Of probabilities as integers: their sums are the same in any order, and off by less than one of these a token."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A row whose last token is in flight: its ``history`` ends before it. ``logit_row`` is its row of logits, which
    gives the token at ``position``; ``source`` the place of the token in flight among those of the step before."""

    row: Row
    position: int
    logit_row: int
    source: int


@dataclass(frozen=True, slots=True)
class Group:
    """N rows that are treated alike: ``rows`` numbers theirs, ``adjacent`` as a slice where they are. ``arrays`` are
    numbers of a parcel's arrays, by name; ``most`` is how many candidates a cut row has (0: any number), ``ranked``
    whether it must know them in order."""

    kind: Kind
    edited: bool
    adjacent: slice | None
    arrays: dict[str, int]
    most: int = 0
    ranked: bool = True
    typical: bool = False
    partly_masked: bool = False


def stage(parts: Sequence[Part], vocabulary: int, parcel: Parcel, unseen: Sequence[Unseen] = ()) -> tuple[Group, ...]:
    """Put all that `sample` needs of ``parts`` into ``parcel``. ``unseen`` are rows whose sampling needs a history."""
    missing = {one.logit_row: one for one in unseen}
    ordered = sorted(parts, key=_alike)
    return tuple(_stage(list(alike), vocabulary, parcel, missing) for _, alike in groupby(ordered, _alike))


def _alike(part: Part) -> tuple[int, bool, bool, bool]:
    return part.kind, part.edits is not None, _most(part) > 0, _ranked(part)


def _ranked(part: Part) -> bool:
    """Whether candidates must be known in order."""
    return bool(part.top_k.any() or (part.typical_p < 1).any())


def _most(part: Part) -> int:
    """The largest top_k, 0 where a row has none or too large a one."""
    bounded = part.kind is Kind.CUT and part.top_k.min() > 0 and part.top_k.max() <= _FEW
    return int(part.top_k.max()) if bounded else 0


def _stage(parts: Sequence[Part], vocabulary: int, parcel: Parcel, missing: dict[int, Unseen]) -> Group:
    first = parts[0]
    rows = np.concatenate([part.rows for part in parts])
    begin, end = int(rows[0]), int(rows[-1]) + 1
    adjacent = bool((np.diff(rows) == 1).all())
    arrays = {"rows": parcel.add(rows)}
    if first.kind is not Kind.GREEDY:
        names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "uniform")
        table = np.stack([np.concatenate([getattr(part, name) for part in parts]) for name in names])
        arrays["options"] = parcel.add(table)
    masks = None
    if first.edits is not None:
        arrays |= {name: parcel.add(array) for name, array in _edits(parts, vocabulary)}
        masks = [part.edits.masks for part in parts if part.edits is not None]
        if any(mask is not None for mask in masks):
            sizes = [len(part.rows) for part in parts]
            full = [np.full(n, -1) if mask is None else mask for n, mask in zip(sizes, masks, strict=True)]
            arrays["masks"] = parcel.add(np.concatenate(full))
        places = [(place, missing[row]) for place, row in enumerate(rows.tolist()) if row in missing]
        arrays |= {name: parcel.add(array) for name, array in _missing(places, parts, vocabulary)}
    return Group(
        first.kind,
        first.edits is not None,
        slice(begin, end) if adjacent else None,
        arrays,
        most=max(_most(part) for part in parts),
        ranked=_ranked(first),
        typical=any(bool((part.typical_p < 1).any()) for part in parts),
        partly_masked=any(mask is None or bool(mask.min() < 0) for mask in masks or ()),
    )


def _edits(parts: Sequence[Part], vocabulary: int) -> Iterable[tuple[str, np.ndarray]]:
    """Places and values of edits in the group's flattened logits."""
    for name in ("allowed", "barred", "bias", "seen"):
        if (entries := _entries(parts, name)) is not None:
            at, values = entries.flat(vocabulary)
            yield name, at
            if name == "allowed":
                yield "restricted", np.unique(at // vocabulary)
            if len(values):
                yield f"{name} values", np.ascontiguousarray(values)


def _entries(parts: Sequence[Part], name: str) -> Entries | None:
    """Those of all parts, by their rows in the group."""
    found, first = [], 0
    for part in parts:
        entries: Entries | None = getattr(part.edits, name)
        if entries is not None:
            found.append((entries.rows + first, entries.ids, entries.values))
        first += len(part.rows)
    return Entries(*(np.concatenate(arrays, axis=-1) for arrays in zip(*found, strict=True))) if found else None


def _missing(
    places: Sequence[tuple[int, Unseen]], parts: Sequence[Part], vocabulary: int
) -> Iterable[tuple[str, np.ndarray]]:
    """What tokens in flight bar and penalise. ``places`` are rows of the group."""
    words = [
        (place * vocabulary + word[-1], one.source, word[-2])
        for place, one in places
        for word in one.row.sampling.bad_words  # type: ignore[union-attr]  # it has a logit row
        if _may_complete(word, one) and word[-1] < vocabulary
    ]
    if words:
        yield "words", np.array(words, np.int64).T
    penalised = [(place, one) for place, one in places if one.row.sampling is not None and one.row.sampling.penalises]
    if not penalised:
        return
    yield "last", np.array([(place * vocabulary, one.source) for place, one in penalised], np.int64).T
    samplings = [one.row.sampling for _, one in penalised]
    penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplings if s is not None]
    yield "last penalties", np.array(penalties, np.float32).T
    if (seen := _entries(parts, "seen")) is not None:
        # By how much an entry's penalty grows if it is the token in flight, and whose that is.
        there = seen.ids < vocabulary
        rows, ids = seen.rows[there], seen.ids[there]
        owners, growth = np.full(len(rows), len(penalised)), np.zeros(len(rows), np.float32)
        for number, (place, one) in enumerate(penalised):
            mine = rows == place
            answered = np.isin(ids[mine], one.row.history[one.row.prompt_length :])
            _, presence, frequency = penalties[number]
            owners[mine], growth[mine] = number, frequency + presence * ~answered
        yield "owners", np.stack([owners, ids])
        yield "growth", growth


def _may_complete(word: tuple[int, ...], unseen: Unseen) -> bool:
    """Whether ``word`` lacks nothing but the token in flight and the one to be drawn."""
    end, start = unseen.position - 1, unseen.position + 1 - len(word)
    return len(word) > 1 and start >= 0 and unseen.row.history[start:end] == word[:-2]


class DeviceSampler:
    """Samples on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._addends = ADDENDS.to(device)

    def sample(
        self, logits_RV: Tensor, groups: Sequence[Group], arrays: Sequence[Tensor], bits: Tensor | None, before: Tensor
    ) -> Tensor:
        """``[R + 1]`` int64: a token for each row, then how many rows had a NaN where one mattered.

        ``logits_RV`` is only read; ``arrays`` is what the parcel became, ``bits`` [rows, bytes] the step's bitmask,
        ``before`` the tokens of the step before.
        """
        found = torch.zeros(len(logits_RV) + 1, dtype=torch.int64, device=logits_RV.device)
        for group in groups:
            given = {name: arrays[number] for name, number in group.arrays.items()}
            rows_N = given["rows"]
            raw_NV = (
                logits_RV[group.adjacent] if group.adjacent is not None else logits_RV.index_select(0, rows_N)
            ).float()
            edited_NV, others_NV, bars_NV = raw_NV, None, None
            if group.edited:
                if "allowed" in given:
                    others_NV = others(given["restricted"], given["allowed"], raw_NV)
                if bits is not None and "masks" in given:
                    bars_NV = bars(given["masks"], bits, self._addends, raw_NV.shape[1], partial=group.partly_masked)
                edited_NV = _edit(raw_NV.clone(), given, before, others_NV, bars_NV)
                sound_NV = rescue(raw_NV, edited_NV, others_NV, bars_NV)
            else:
                sound_NV = usable(raw_NV)
                if group.kind is not Kind.GREEDY:
                    sound_NV.masked_fill_(sound_NV.amax(dim=-1, keepdim=True) == -torch.inf, 0)
            found[-1] += (edited_NV.amax(dim=-1).isnan() & raw_NV.amax(dim=-1).isnan()).sum()
            found.index_copy_(0, rows_N, _draw(sound_NV, group, given))
        return found


def _draw(logits_NV: Tensor, group: Group, given: dict[str, Tensor]) -> Tensor:
    if group.kind is Kind.GREEDY:
        return logits_NV.argmax(dim=-1)
    options = given["options"]
    probs_NV = (logits_NV / options[0].float()[:, None]).softmax(dim=-1)
    if group.kind is Kind.WHOLE:
        return draw_whole(probs_NV, options[5])
    at_once = len(probs_NV) if group.most else _ROWS_AT_ONCE
    few = zip(probs_NV.split(at_once), options.split(at_once, dim=1), strict=True)
    return torch.cat([_draw_cut(probs, of_rows, group) for probs, of_rows in few])


def _draw_cut(probs_NV: Tensor, options: Tensor, group: Group) -> Tensor:
    _, top_k_N, top_p_N, min_p_N, typical_N, uniform_N = options
    floor_N1 = probs_NV.amax(dim=-1, keepdim=True) * min_p_N.float()[:, None]
    mass_NV = torch.where(probs_NV >= floor_N1, probs_NV, 0)
    whole_N = (top_k_N == 0) & (min_p_N == 0)
    if group.ranked:
        sorted_NK, ids_NK = _likeliest(mass_NV, group.most)
        kept_NK = keep(sorted_NK, top_k_N, top_p_N, typical_N if group.typical else None, whole_N)
        mass_NV = torch.zeros_like(mass_NV).scatter_(1, ids_NK, sorted_NK * kept_NK)
    else:
        mass_NV = mass_NV * _nucleus(mass_NV, top_p_N, whole_N)
    sums_NV = mass_NV.cumsum(dim=-1, dtype=torch.float64)
    return find(mass_NV, sums_NV, uniform_N * sums_NV[:, -1]).squeeze(1)


def _nucleus(mass_NV: Tensor, top_p_N: Tensor, whole_N: Tensor) -> Tensor:
    """What top_p alone leaves, as `compiled.draw.keep` does and without sorting: the least mass that is kept is found
    digit by digit, each from the sums of the masses by that digit."""
    units_NV = (mass_NV.double() * _UNIT).long()
    total_N = torch.where(whole_N, _UNIT, units_NV.sum(dim=-1).double())
    limit_N = torch.where(top_p_N < 1, (top_p_N * total_N).ceil(), 2 * _UNIT).long()
    bits_NV = mass_NV.view(torch.int32)
    left_N1, least_N1 = limit_N[:, None], torch.zeros_like(limit_N)[:, None]
    equal_NV = torch.ones_like(bits_NV, dtype=torch.bool)
    for shift, width in _DIGITS:
        digit_NV = (bits_NV >> shift & (1 << width) - 1).long()
        sums_NB = units_NV.new_zeros(len(units_NV), 1 << width).scatter_add_(1, digit_NV, units_NV * equal_NV)
        above_NB = sums_NB.flip(-1).cumsum(dim=-1).flip(-1) - sums_NB
        found_N1 = (above_NB >= left_N1).sum(dim=-1, keepdim=True)
        left_N1 = left_N1 - above_NB.gather(1, found_N1)
        least_N1 = least_N1 << width | found_N1
        equal_NV &= digit_NV == found_N1
    # Of those that are equal to the least, the first in the vocabulary's order.
    unit_N1 = (equal_NV * units_NV).amax(dim=-1, keepdim=True).clamp(min=1)
    few_N1 = (left_N1 + unit_N1 - 1) // unit_N1
    return (bits_NV > least_N1) | (equal_NV & (equal_NV.cumsum(dim=-1) <= few_N1))


def _likeliest(mass_NV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The ``most`` likeliest ids (0: all), sorted, and their masses. Equals go in the vocabulary's order."""
    vocabulary = mass_NV.shape[1]
    if not most:
        return mass_NV.sort(dim=-1, descending=True, stable=True)
    # No two keys are equal: a mass's bits, which order as it does, then how far its id is from the end.
    keys_NV = mass_NV.view(torch.int32).long() << 32 | torch.arange(vocabulary - 1, -1, -1, device=mass_NV.device)
    ids_NK = vocabulary - 1 - (keys_NV.topk(min(most, vocabulary), dim=-1).values & 0xFFFFFFFF)
    return mass_NV.gather(1, ids_NK), ids_NK


def _edit(
    logits_NV: Tensor, given: dict[str, Tensor], before: Tensor, others_NV: Tensor | None, bars_NV: Tensor | None
) -> Tensor:
    """`compiled.sampler.edit`, and what tokens in flight add to it; in place."""
    flat = logits_NV.view(-1)
    if others_NV is not None:
        logits_NV.masked_fill_(others_NV, -torch.inf)
    if "barred" in given:
        flat.index_fill_(0, given["barred"], -torch.inf)
    if "words" in given:
        at, source, needed = given["words"]
        # Added, because several words may bar one token.
        flat.index_add_(0, at, torch.where(before.index_select(0, source) == needed, -torch.inf, 0.0))
    if "bias" in given:
        flat.index_add_(0, given["bias"], given["bias values"][0])
    repetition, subtracted = given.get("seen values", (None, None))
    if "last" in given:
        begin, source = given["last"]
        token = before.index_select(0, source)
        again, presence, frequency = given["last penalties"]
        known = torch.zeros_like(token, dtype=torch.bool)
        if subtracted is not None:
            owners, ids = given["owners"]
            hit = torch.cat([token, token.new_full((1,), -1)]).index_select(0, owners) == ids
            subtracted = subtracted + hit * given["growth"]
            counts = torch.zeros(len(token) + 1, dtype=torch.int64, device=token.device).index_add_(
                0, owners, hit.long()
            )
            known = counts[:-1] > 0
        _penalise(flat, begin + token, torch.where(known, 1.0, again), torch.where(known, 0.0, presence + frequency))
    if repetition is not None and subtracted is not None:
        _penalise(flat, given["seen"], repetition, subtracted)
    return logits_NV if bars_NV is None else logits_NV.add_(bars_NV)


def _penalise(flat: Tensor, at: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    logits = flat.index_select(0, at)
    flat.index_copy_(0, at, torch.where(logits > 0, logits / repetition, logits * repetition) - subtracted)
