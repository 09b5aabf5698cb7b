"""Several answers to one prompt: forks that share its pages, and beam search over such forks."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

from streamengine.kv import KVPool
from streamengine.request import MAX_SEED, Delta, Finish, Request, Sequence

STOP_TOKEN = Finish("stop", "stop_token")
MAX_TOKENS = Finish("length", "max_tokens")
COMPLETE = Finish("stop", "grammar")


def seats(request: Request) -> int:
    """Sequences that run at once for it."""
    return max(request.n, request.beam_width)


def seed_of(seed: int, index: int) -> int:
    """Of answer ``index``: the next 64-bit integer each, the lowest one behind the highest."""
    return (seed + index + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


def fork(parent: Sequence, index: int, computed: int, pool: KVPool) -> Sequence:
    """A sequence with ``parent``'s tokens, of which ``computed`` have their KV in ``parent``'s pages.

    Full pages are shared. The partial one is held until it was copied: with its next row the fork takes a page
    of its own and `Step.copies` names both (copy on write).
    """
    assert parent.copy_from is None, f"{parent} is forked before it was copied itself"
    full, partial = divmod(computed, pool.page_size)
    child = Sequence(parent.request, parent.arrival, parent.tokens.copy(), parent.state, index=index)
    child.rank = (*parent.rank[:-1], index)
    child.most_pages, child.since = parent.most_pages, parent.since
    child.sampling, child.lockstep = parent.sampling, parent.lockstep
    child.computed, child.pages = computed, parent.pages[:full]
    child.scored = len(parent.request.prompt) - 1
    child.chain = parent.chain and parent.chain.fork()
    child.constraint = parent.constraint and parent.constraint.fork()
    if partial:
        child.copy_from = parent.pages[full]
        pool.share((child.copy_from,))
    pool.share(child.pages)
    return child


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer of a beam search: ``total`` is the sum of its tokens' log-probabilities."""

    tokens: tuple[int, ...]
    total: float
    score: float
    finish: Finish

    def told(self, request: Request, index: int) -> Delta:
        """As answer ``index`` of ``request``."""
        return Delta(
            request=request.id,
            tokens=self.tokens,
            computed=len(request.prompt),
            finish=self.finish,
            index=index,
            beam_score=self.score,
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """Beam number ``parent`` goes on with ``token``."""

    parent: int
    token: int
    total: float


class BeamSearch:
    """The search of one request: the ``width`` most probable beginnings go on in every round.

    A stop token ends a beam and gives its place to the next best one. The score of an answer is ``total / length **
    length_penalty``, its length counting the token that ended it. Ties go to the better beam, then to the likelier
    token, so the result depends on nothing else that runs.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.finished: list[Hypothesis] = []
        """Best first, no more than ``width``."""

    def advance(self, beams: Items[tuple[tuple[int, ...], float, Items[tuple[int, float]]]]) -> list[Branch]:
        """One round: ``(answer, total, likeliest next tokens)`` of each beam. No branches: it is over."""
        request = self._request
        candidates = [
            Branch(parent, token, total + logprob)
            for parent, (_, total, top) in enumerate(beams)
            for token, logprob in top
        ]
        candidates.sort(key=lambda branch: -branch.total)
        length = len(beams[0][0]) + 1
        branches: list[Branch] = []
        lived = 0
        for branch in candidates:
            if lived == request.beam_width:
                break
            stopped = branch.token in request.stop_token_ids
            lived += not stopped
            if stopped or length == request.max_tokens:
                answer = (*beams[branch.parent][0], branch.token)
                self._end(answer, branch.total, STOP_TOKEN if stopped else MAX_TOKENS)
            else:
                branches.append(branch)
        return branches if branches and self._may_win(branches[0].total, length) else []

    def _end(self, tokens: tuple[int, ...], total: float, finish: Finish) -> None:
        self.finished.append(Hypothesis(tokens, total, self._score(total, len(tokens)), finish))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self._request.beam_width :]

    def _may_win(self, total: float, length: int) -> bool:
        """Whether a beam of ``length`` could still beat one of ``width`` finished ones: a total only falls."""
        worst = self.finished[-1].score if len(self.finished) == self._request.beam_width else -inf
        best_length = self._request.max_tokens if self._request.length_penalty > 0 else length + 1
        return self._score(total, best_length) > worst

    def _score(self, total: float, length: int) -> float:
        return total / length**self._request.length_penalty
