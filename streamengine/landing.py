"""The scheduler's books as transfers see them: pages that one holds, beside or in place of a request.

On the engine that computed a prompt a transfer shares its pages, so that they outlive the request. On the engine that
goes on with it a transfer takes pages for it to land in; they become the request's own when it is admitted, and stay
the transfer's for as long as something may still be written into them, whatever becomes of the request.
"""

from compiled.step import PADDING_PAGE, Logprob, Row
from streamengine.books import Books
from streamengine.groups import seats
from streamengine.request import Delta, Sequence
from streamengine.rows import accept, delta_of


class Landing:
    """
    Args:
        books: whose pages.
        reserve: pages that transfers in both directions, and requests which wait with landed pages, may have at most.
            No single request may need any of these, so the first in rank is never short because of a transfer.
    """

    def __init__(self, books: Books, reserve: int) -> None:
        self._books = books
        self.reserve = reserve
        self.begun_tokens = 0
        """Answer tokens that came with `begin`."""

    @property
    def held(self) -> int:
        """Pages of transfers to this engine; one that two of them share counts twice."""
        return self._books.held

    @property
    def pages(self) -> int:
        """The same, and those that are kept for other engines."""
        return self.held + sum(map(len, self._books.kept.values()))

    @property
    def transfers(self) -> set[str]:
        """Those to this engine that hold something."""
        return set(self._books.holds)

    @property
    def kept_for(self) -> set[str]:
        """Those to other engines for which something is kept."""
        return set(self._books.kept)

    def can_begin(self, sequence: Sequence) -> bool:
        """Whether the pages of its prompt are all that its answers begin with. Several of them compute its last token
        once more, whose window may begin on a page that is gone."""
        return goes_on(sequence) or self._books.window is None

    def uncached(self, sequence: Sequence) -> int:
        """Tokens of a new request that would have to be computed here."""
        return len(sequence.tokens) - len(self._books.find(sequence)) * self._books.pool.page_size

    def kept(self, transfer: str) -> tuple[int, ...] | None:
        """The page table of a prompt that was computed for another engine; None where there is none."""
        return self._books.kept.get(transfer)

    def begin(self, sequence: Sequence, token: int, logprob: Logprob | None, queued_s: float, cached: int) -> Delta:
        """``token`` was sampled elsewhere behind the prompt of ``sequence``, which waits nowhere yet: see `accept`."""
        prompt = sequence.request.prompt
        sequence.pending, sequence.queued_s, sequence.cached = 1, queued_s, cached
        taken = accept(sequence, Row(sequence.request.id, prompt[-1:], len(prompt) - 1, ()), (token,), resident=False)
        self.begun_tokens += len(taken.tokens)
        logprobs = () if logprob is None else (logprob,)
        return delta_of(
            sequence, len(prompt), taken.tokens, taken.finish, logprobs[: len(taken.tokens)], (), taken.forced
        )

    def claim(
        self, transfer: str, sequence: Sequence, theirs: tuple[int, ...], room: int
    ) -> tuple[tuple[int, int], ...] | None:
        """Pages for what another engine has in ``theirs``, held by ``transfer``: ``(there, here)`` of those to copy.

        What the prefix cache has is not copied. None, and nothing taken, where that would make more than ``room`` pages
        held, or there are none now.
        """
        books, pool = self._books, self._books.pool
        # A page that is not full is written on, and must be nobody else's.
        computed = min(len(sequence.request.prompt), len(sequence.tokens) - 1)
        found = [entry.page for entry in books.find(sequence)][: computed // pool.page_size]
        wanted = [i for i, page in enumerate(theirs) if i >= len(found) and page != PADDING_PAGE]
        needed = len(wanted) + sum(pool.is_idle(page) for page in found)
        growth = sum(books.growth(other, len(other.pages)) for other in books.running)
        if self.held + len(found) + len(wanted) > room or needed + growth > pool.available:
            return None
        pool.share(found)
        taken = pool.take(len(wanted))
        assert taken is not None, "pages were available"
        table = dict(enumerate(found)) | dict(zip(wanted, taken, strict=True))
        books.hold(transfer, tuple(table.get(i, PADDING_PAGE) for i in range(len(theirs))))
        return tuple((theirs[i], table[i]) for i in wanted)

    def enter(self, sequence: Sequence, transfer: str | None = None) -> list[Delta]:
        """Let ``sequence`` wait for its turn, with the pages of ``transfer``. Gives what `Books.queue` does."""
        if transfer is not None:
            sequence.landed = self._books.holds.pop(transfer)
        return self._books.queue(sequence)

    def drop(self, transfer: str) -> None:
        """Give up what ``transfer`` holds, or what is kept for it, if anything."""
        self._books.drop(transfer)


def goes_on(sequence: Sequence) -> bool:
    """Whether the token behind the prompt is its answer's first. Of several answers each draws its own."""
    return seats(sequence.request) == 1
