"""Between a sequence and a step: the row that computes it further, and what comes back for it."""

from dataclasses import replace
from typing import NamedTuple

from compiled.step import Logprob, Masks, Row
from streamengine.errors import GrammarError, InvalidRequest
from streamengine.groups import COMPLETE, MAX_TOKENS, STOP_TOKEN
from streamengine.guided.grammar import Constraint, MakeMasks
from streamengine.request import Delta, Finish, Request, Sequence, State
from streamengine.speculation import accepted

_PLACEHOLDER = 0


class Plan:
    """A step in the making: its rows, whose they are, and the tokens that it has left.

    Args:
        tokens: of the step.
        prefill: of these, for sequences with more than one token to compute.
        threshold: of these, for one such sequence.
    """

    def __init__(self, tokens: int, prefill: int, threshold: int) -> None:
        self.left = tokens
        self._prefill = prefill
        self._threshold = threshold
        self.rows: list[Row] = []
        self.sequences: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        self.constrained: list[tuple[Sequence, int, tuple[int, ...]]] = []
        """Whose grammar bears on this step, its first row in the bitmask, and its guesses."""
        self.mask_rows = 0
        self.parents: list[Sequence] = []
        """Those whose prompt is computed by this step, and whose other answers can begin."""

    def chunk(self, need: int, behind: int = 0) -> int:
        """How many of ``need`` tokens to compute; ``behind`` others still want a token each."""
        return min(need, max(1, self.left - behind), self._prefill, self._threshold)

    def masks(self, make: MakeMasks) -> "StepMasks | None":
        return StepMasks(make, self.constrained, self.mask_rows) if self.constrained else None

    def add(self, sequence: Sequence, end: int, page_size: int, drafts: tuple[int, ...] = ()) -> None:
        """Compute ``sequence`` up to ``end``, and ``drafts`` behind that. Its pages are there."""
        size = end - sequence.computed
        if size > 1:
            self._prefill -= size
        self.left -= size + len(drafts)
        if sequence.copy_from is not None:
            self.copies.append((sequence.copy_from, sequence.pages[sequence.computed // page_size]))
            sequence.copy_from = None
        row = _row(sequence, end, drafts)
        if sequence.constraint is not None and row.sampling is not None:
            row = replace(row, mask=self.mask_rows)
            self.constrained.append((sequence, self.mask_rows, drafts))
            self.mask_rows += 1 + len(drafts)
        self.rows.append(row)
        self.sequences.append(sequence)
        if sequence.unborn and sequence.pending and not sequence.request.beam_width:
            self.parents.append(sequence)


class StepMasks:
    """The bitmask of a step, see `Masks`: in the making from the moment when all tokens are there that its grammars
    have to know. That is at once, unless the step in flight before it samples one of them.

    Rows of those who ended meanwhile, or whose next tokens are known without sampling, allow everything.
    """

    def __init__(self, make: MakeMasks, rows: list[tuple[Sequence, int, tuple[int, ...]]], count: int) -> None:
        self._make, self._rows, self._count = make, rows, count
        self._made: Masks | None = None
        if all(sequence.pending == 1 + len(drafts) for sequence, _, drafts in rows):
            self.begin()

    def begin(self) -> None:
        """The step before has been taken in. Once is enough."""
        if self._made is None:
            places = [
                (sequence.constraint, row, drafts)
                for sequence, row, drafts in self._rows
                if sequence.constraint is not None and sequence.pending and sequence.state is not State.FINISHED
            ]
            self._made = self._make(places, self._count)

    @property
    def words(self) -> int:
        return self._there.words

    def wait(self) -> memoryview:
        return self._there.wait()

    @property
    def _there(self) -> Masks:
        assert self._made is not None, "a step is sampled before the tokens of the one before it were taken in"
        return self._made


def _row(sequence: Sequence, end: int, drafts: tuple[int, ...]) -> Row:
    request, start, known = sequence.request, sequence.computed, sequence.tokens
    tokens = tuple(known[start:end])
    pending = end > len(known)
    if pending:
        assert end == len(known) + 1, "two steps in flight while a third is planned"
        tokens += (_PLACEHOLDER,)
    sequence.computed = end + len(drafts)
    targets: tuple[int, ...] = ()
    if request.prompt_logprobs is not None and sequence.scored < min(end, len(request.prompt) - 1):
        targets = request.prompt[start + 1 : end + 1]
    if end < sequence.known:
        sampling = None
    else:
        sampling = sequence.sampling
        sequence.pending += 1 + len(drafts)
        if not (drafts or targets or sequence.needs_history or sequence.index):  # the many
            return Row(request.id, tokens, start, sequence.pages, sampling, pending)
    return Row(
        request=request.id,
        tokens=tokens + drafts,
        start=start,
        pages=sequence.pages,
        sampling=sampling,
        pending=pending,
        drafts=len(drafts),
        history=(*known[:start], *tokens) if sampling and sequence.needs_history else (),
        prompt_length=len(request.prompt) if sampling and sequence.needs_history else 0,
        targets=targets,
        targets_top=request.prompt_logprobs or 0,
        index=sequence.index,
    )


class Accepted(NamedTuple):
    """The new ``tokens`` of an answer, the last ``forced`` of them not sampled; its KV is right up to ``end``."""

    tokens: tuple[int, ...]
    end: int
    finish: Finish | None = None
    forced: int = 0


def accept(sequence: Sequence, row: Row, sampled: tuple[int, ...], resident: bool) -> Accepted:
    """Append what was sampled for ``row``.

    The token behind a wrong guess still counts, those behind it do not. A stop token wins over the grammar's end, and
    that over the length. Tokens that the grammar forces follow those that were sampled. A beam's tokens are chosen
    later. ``resident``: the row's KV is in the sequence's pages.
    """
    request, end = sequence.request, row.start + len(row.tokens)
    if not sampled:
        return Accepted((), end)
    sequence.pending -= 1 + row.drafts
    if row.drafts:
        right = accepted(row.tokens[-row.drafts :], sampled)
        sampled, end = sampled[: right + 1], end - row.drafts + right
        if resident:
            sequence.computed = end
    if request.beam_width:
        return Accepted((), end)
    if sequence.constraint is None:  # the many
        tokens, finish = _take(sequence, sampled)
        return Accepted(tokens, end, finish)
    return _settle(sequence, sampled, end)


def continue_answer(sequence: Sequence) -> Accepted:
    """Append the tokens that another engine answered with, each as if it were sampled here, so that grammar and budget
    stand where they stood there; what follows from the last one, forced tokens or an end, comes back.

    Raises:
        InvalidRequest: the request could not have been answered so.
    """
    answered, tokens = sequence.request.answered, list[int]()
    taken = Accepted((), 0)
    while len(tokens) < len(answered) and taken.finish is None:
        token, constraint = answered[len(tokens)], sequence.constraint
        free = constraint is None or token in sequence.request.stop_token_ids
        if not free and constraint is not None and not constraint.trim((token,)):
            raise _no_answer(len(tokens), "the grammar does not allow it")
        taken = _settle(sequence, (token,), 0)
        tokens += taken.tokens
        if wrong := next((i for i, (a, b) in enumerate(zip(answered, tokens, strict=False)) if a != b), None):
            raise _no_answer(wrong, f"the grammar leaves only {tokens[wrong]}")
    if len(tokens) < len(answered):
        raise _no_answer(len(tokens), "the answer ends before it")
    return taken._replace(tokens=tuple(tokens[len(answered) :]))


def _no_answer(index: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"token {index} of continues is none of this answer: {why}", param="continues")


def _settle(sequence: Sequence, sampled: tuple[int, ...], end: int) -> Accepted:
    """Append ``sampled``, and whatever needs no choice behind it."""
    request = sequence.request
    tokens, finish = _take(sequence, sampled)
    forced: tuple[int, ...] = ()
    if finish is None and sequence.constraint is not None and request.jump and sequence.sampling.logprobs is None:
        forced, finish = _take(sequence, tuple(sequence.constraint.forced()))
    taken = Accepted(tokens + forced, end, finish, len(forced))
    closes = request.grammar is not None and request.grammar.close and finish in (None, MAX_TOKENS)
    return _close(sequence, sequence.constraint, taken) if closes and sequence.constraint else taken


def _close(sequence: Sequence, constraint: Constraint, taken: Accepted) -> Accepted:
    """Complete the answer while that still fits its ``max_tokens``, at the cost of the last tokens if need be."""
    ending = constraint.end(len(taken.tokens), sequence.request.max_tokens - sequence.answered)
    if ending is None:
        return taken
    drop, tail = ending
    kept = taken.tokens[: len(taken.tokens) - drop]
    sequence.tokens[len(sequence.tokens) - drop :] = tail
    finish = STOP_TOKEN if tail[-1] in sequence.request.stop_token_ids else COMPLETE
    return Accepted((*kept, *tail), taken.end, finish, len(tail) + max(0, taken.forced - drop))


def _take(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish | None]:
    """Append ``tokens`` up to the one that ends the answer."""
    request, constraint = sequence.request, sequence.constraint
    left = request.max_tokens - sequence.answered
    if constraint is not None and (error := constraint.error):
        return (), _broken(error, request)  # what was drawn was drawn under a mask that is none
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        if token in request.stop_token_ids:
            return tokens[:count], STOP_TOKEN
        if constraint is not None:
            if constraint.take(token):
                return tokens[:count], COMPLETE
            if error := constraint.error:
                return tokens[:count], _broken(error, request)
        if count == left:
            return tokens[:count], MAX_TOKENS
    return tokens, None


def _broken(error: str, request: Request) -> Finish:
    param = "tools" if request.grammar is not None and request.grammar.kind == "tools" else "response_format"
    return Finish("error", GrammarError.code, f"the grammar cannot be followed: {error}", param)


def scores_of(sequence: Sequence, row: Row, scores: tuple[Logprob, ...]) -> tuple[Logprob, ...]:
    """Those of ``row``'s targets that were not told before, as some were after a preemption."""
    scores = scores[max(0, sequence.scored - row.start) :]
    sequence.scored += len(scores)
    return scores


def delta_of(
    sequence: Sequence,
    computed: int,
    tokens: tuple[int, ...] = (),
    finish: Finish | None = None,
    logprobs: tuple[Logprob, ...] = (),
    scores: tuple[Logprob, ...] = (),
    forced: int = 0,
) -> Delta:
    queued_s, sequence.queued_s = sequence.queued_s, None
    cached, sequence.cached = sequence.cached, 0
    request = sequence.request
    return Delta(
        request=request.id,
        tokens=tokens,
        computed=min(computed, len(request.prompt)),
        queued_s=queued_s,
        finish=finish,
        index=sequence.index,
        cached=cached,
        logprobs=logprobs,
        prompt_logprobs=scores,
        forced=forced,
    )
