"""KV pages as numbers: which are free, how many hold each. Knows no request, no tensor and no clock."""

from collections.abc import Iterable

from compiled.step import PADDING_PAGE
from streamengine.prefix import PrefixCache


class KVPool:
    """Hands out the pages of one KV cache, all but `PADDING_PAGE`.

    A page that nobody holds is blank, or idle in the prefix cache: blank ones are handed out first, last in first
    out, then idle ones as the cache evicts them. Each time that a page is handed out it begins a new generation.

    Args:
        pages: number of pages, the padding page among them.
        page_size: tokens per page.
        prefix: remembers the content of pages beyond their last holder; none by default.
        debug: remember which pages became blank, for `drain_freed`.
    """

    def __init__(self, pages: int, page_size: int, prefix: PrefixCache | None = None, *, debug: bool = False) -> None:
        assert pages >= 2 and page_size >= 1, f"{pages} pages of {page_size} tokens"
        self.page_size = page_size
        self.prefix = prefix
        self.debug = debug
        self._refs = [0] * pages
        self._refs[PADDING_PAGE] = 1
        self._generations = [0] * pages
        self._blank = list(range(pages - 1, PADDING_PAGE, -1))
        self._freed: set[int] = set()

    @property
    def capacity(self) -> int:
        """Pages that one sequence could have if it were alone."""
        return len(self._refs) - 1

    @property
    def available(self) -> int:
        """Pages that `take` could give."""
        return len(self._blank) + (self.prefix.idle if self.prefix else 0)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, n: int) -> list[int] | None:
        """``n`` free pages, held once each; None, and nothing taken, when there are fewer."""
        if n > self.available:
            return None
        taken = []
        for _ in range(n):
            page = self._blank.pop() if self._blank else self.prefix.evict()  # type: ignore[union-attr]
            self._refs[page] = 1
            self._generations[page] += 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more: they are held already, or idle in the prefix cache."""
        for page in pages:
            if page == PADDING_PAGE:
                continue
            if self._refs[page] == 0:
                assert self.prefix is not None
                self.prefix.revive(page)
            self._refs[page] += 1

    def is_idle(self, page: int) -> bool:
        return self._refs[page] == 0

    def free(self, pages: tuple[int, ...]) -> None:
        """Let go of a page table, of which pages that fell out of a window are gone already.

        From its end backwards: the last page is the first to be evicted, the first one to be taken again.
        """
        for page in reversed(pages):
            if page == PADDING_PAGE:
                continue
            assert self._refs[page] > 0, f"page {page} is freed but nobody holds it"
            self._refs[page] -= 1
            if self._refs[page] == 0 and not (self.prefix and self.prefix.release(page)):
                self._blank.append(page)
                if self.debug:
                    self._freed.add(page)

    def generations(self, pages: Iterable[int]) -> list[int]:
        """How often each was handed out: equal numbers at two times mean that it was not in between."""
        return [self._generations[page] for page in pages]

    def drain_freed(self) -> list[int]:
        """Pages that became blank since the last call and still are. Only with ``debug``."""
        pages = sorted(self._freed.intersection(self._blank))
        self._freed.clear()
        return pages

    def check(self, tables: Iterable[int] | None = None) -> None:
        """Prove that every page is either blank, idle or held; with ``tables``, by exactly those entries."""
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a page is twice among the blank ones"
        assert self._refs[PADDING_PAGE] == 1, "the padding page was handed out"
        assert not any(self._refs[page] for page in blank), "a page is blank and held"
        if self.prefix is not None:
            self.prefix.check(self._refs)
        held = sum(refs > 0 for refs in self._refs) - 1
        free = self.available
        assert free + held == self.capacity, f"{free} free and {held} held of {self.capacity} pages"
        if tables is not None:
            counted = [0] * len(self._refs)
            for page in tables:
                counted[page] += 1
            counted[PADDING_PAGE] = 1
            assert counted == self._refs, f"page tables say {counted}, holders {self._refs}"

    def statistics(self) -> dict[str, float]:
        """Pages: ``kv_pages`` in all that may be handed out, ``kv_pages_used`` of them held."""
        return {
            "kv_pages": self.capacity,
            "kv_pages_used": self.capacity - self.available,
            **(self.prefix.statistics() if self.prefix else {}),
        }
