"""KV pages as numbers: which are free, how many hold each. Knows no request, no tensor and no clock."""

from dataclasses import dataclass

from compiled.step import PADDING_PAGE

_NONE = -1


@dataclass(slots=True, eq=False)
class _Page:
    """``refs`` counts the holders; ``next`` is the page behind this one in the free list (`_NONE` at its end)."""

    refs: int = 0
    next: int = _NONE


class KVPool:
    """Hands out the pages of one KV cache, all but `PADDING_PAGE`.

    Page records lie in an array indexed by page; the free list runs through the records, last in, first out.

    Args:
        pages: number of pages, the padding page among them.
        page_size: tokens per page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        assert pages >= 2 and page_size >= 1, f"{pages} pages of {page_size} tokens"
        self.page_size = page_size
        self._pages = [_Page(next=page + 1) for page in range(pages)]
        self._pages[-1].next = _NONE
        self._pages[PADDING_PAGE] = _Page(refs=1)
        self._head = PADDING_PAGE + 1
        self._available = self.capacity

    @property
    def capacity(self) -> int:
        """Pages that one sequence could have if it were alone."""
        return len(self._pages) - 1

    @property
    def available(self) -> int:
        return self._available

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, n: int) -> list[int] | None:
        """``n`` free pages, held once each; None, and nothing taken, when there are fewer."""
        if n > self._available:
            return None
        taken = []
        for _ in range(n):
            page = self._head
            record = self._pages[page]
            record.refs = 1
            self._head, record.next = record.next, _NONE
            taken.append(page)
        self._available -= n
        return taken

    def free(self, pages: tuple[int, ...]) -> None:
        """Let go of a sequence's page table. From its end backwards: its first page is the next to be taken."""
        for page in reversed(pages):
            record = self._pages[page]
            assert page != PADDING_PAGE and record.refs > 0, f"page {page} is freed but nobody holds it"
            record.refs -= 1
            if record.refs == 0:
                self._head, record.next = page, self._head
                self._available += 1

    def check(self) -> None:
        """Prove that every page is either free or held, and never both."""
        free = set()
        page = self._head
        while page != _NONE:
            assert page not in free, f"page {page} is twice in the free list"
            assert self._pages[page].refs == 0, f"page {page} is free and held"
            free.add(page)
            page = self._pages[page].next
        held = sum(record.refs > 0 for record in self._pages) - 1
        assert self._pages[PADDING_PAGE].refs == 1, "the padding page was handed out"
        assert len(free) == self._available, f"{len(free)} pages are free, {self._available} are counted"
        assert len(free) + held == self.capacity, f"{len(free)} free and {held} held of {self.capacity} pages"

    def statistics(self) -> dict[str, float]:
        """Pages: ``kv_pages`` in all that may be handed out, ``kv_pages_used`` of them held."""
        return {"kv_pages": self.capacity, "kv_pages_used": self.capacity - self._available}
