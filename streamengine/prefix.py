"""The prefix cache: which page holds the keys and values of which tokens behind which prefix.

Content only; who holds a page is the pool's to know. Full pages alone are cached. The digest of a page is chained,
``H_i = hash(H_{i-1}, tokens of page i)``, and begins at a root of tagged, length-framed extras: what the model is,
and a salt derived from a secret of this process and the tenant, so tenants share nothing and a digest
tells nobody anything. A digest only finds an entry; the entry must then hold these very tokens behind the entry
that was matched before it, so that a collision is a miss and never somebody else's answer.

A page can be hit once the step that computed it was committed, not within that step. Of equal pages that
were computed side by side the first is cached and the others stay as they are: a page table never changes under
its owner.

What nobody holds is evicted least recently used first, a sequence's last page before its first one. While
several tenants have pages here, one with more than its quota gives up its own before anybody else's are touched.
"""

import hmac
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from compiled.step import PADDING_PAGE

_EVICTED = -1


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def _framed(extras: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Tags and values, each behind its length: no value can pass for another tag's."""
    return b"".join(len(part).to_bytes(8, "big") + part for extra in extras for part in extra)


@dataclass(slots=True, eq=False)
class Entry:
    """Page ``page`` holds ``tokens``, computed behind those of ``parent`` and its parents."""

    tenant: str
    parent: "Entry | None"
    tokens: tuple[int, ...]
    digest: bytes
    page: int


@dataclass(slots=True, eq=False)
class Chain:
    """One sequence's way into the cache: ``pages`` of its pages were matched or added, the last one as ``last``.

    Digests are kept for good: tokens are only ever appended.
    """

    tenant: str
    digests: list[bytes]
    pages: int = 0
    last: Entry | None = None
    closed: bool = False
    """Nothing more of it can be added: a page is missing, or its digest belongs to something else."""

    def restart(self) -> None:
        """Its page table was given up."""
        self.pages, self.last, self.closed = 0, None, False

    def cut(self, pages: int) -> None:
        """Tokens behind ``pages`` pages were taken back."""
        del self.digests[1 + pages :]

    def fork(self) -> "Chain":
        return Chain(self.tenant, self.digests.copy(), self.pages, self.last, self.closed)


@dataclass(slots=True)
class _Share:
    """One tenant's part: ``pages`` in all, of which nobody holds the ``idle`` ones (oldest first)."""

    pages: int = 0
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)


class PrefixCache:
    """An index of one pool's pages.

    Args:
        page_size: tokens per page.
        pages: pages of the pool that may be handed out.
        identity: what decides the content of a page besides its tokens: model, dtype, …
        secret: random, and never leaves this process.
        quota: share of the pool that one tenant may keep while there are others.
    """

    def __init__(
        self, *, page_size: int, pages: int, identity: Iterable[str] = (), secret: bytes = b"", quota: float = 0.5
    ) -> None:
        self._page_size = page_size
        self._quota = quota * pages
        self._identity = [(b"model", value.encode()) for value in identity]
        self._secret = secret
        self._index: dict[bytes, Entry] = {}
        self._entries: dict[int, Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._shares: dict[str, _Share] = {}
        self._greedy: dict[str, None] = {}
        """Tenants over their quota, in the order in which they came to be: a set's order differs from run to run."""
        self._counts: Counter[str] = Counter()

    # what a sequence does

    def chain(self, tenant: str) -> Chain:
        salt = hmac.digest(self._secret, tenant.encode(), "sha256")
        return Chain(tenant, [_hash(_framed([*self._identity, (b"salt", salt)]))])

    def find(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[Entry]:
        """The entries of the longest cached prefix of ``tokens`` with at most ``limit`` tokens."""
        found: list[Entry] = []
        parent = None
        for number in range(limit // self._page_size):
            entry = self._index.get(self._digest(chain, tokens, number))
            if entry is None or not self._is(entry, chain, parent, tokens, number):
                break
            found.append(entry)
            parent = entry
        return found

    def enter(self, chain: Chain, found: list[Entry], queried: int) -> None:
        """``chain`` begins with what was found for it; ``queried`` tokens were asked for."""
        chain.restart()
        chain.pages, chain.last = len(found), found[-1] if found else None
        self._counts["prefix_queries"] += queried
        self._counts["prefix_hits"] += len(found) * self._page_size

    def add(self, chain: Chain, tokens: Sequence[int], pages: Sequence[int], computed: int) -> None:
        """Cache the full pages of ``computed`` tokens, whose table is ``pages``."""
        if chain.last is not None and chain.last.page == _EVICTED:
            chain.restart()  # the pages of its own may take the place of an equal one that is gone
        while not chain.closed and chain.pages < computed // self._page_size:
            number = chain.pages
            digest = self._digest(chain, tokens, number)
            entry = self._index.get(digest)
            if entry is None and pages[number] != PADDING_PAGE:
                entry = self._insert(chain, self._tokens(tokens, number), digest, pages[number])
            elif entry is None or not self._is(entry, chain, chain.last, tokens, number):
                chain.closed = True
                return
            chain.last = entry
            chain.pages += 1

    def _is(self, entry: Entry, chain: Chain, parent: Entry | None, tokens: Sequence[int], number: int) -> bool:
        return entry.parent is parent and entry.tenant == chain.tenant and entry.tokens == self._tokens(tokens, number)

    def _tokens(self, tokens: Sequence[int], number: int) -> tuple[int, ...]:
        return tuple(tokens[number * self._page_size : (number + 1) * self._page_size])

    def _digest(self, chain: Chain, tokens: Sequence[int], number: int) -> bytes:
        """Of page ``number``; those before it are known."""
        digests = chain.digests  # the root, then one for each page
        if number + 1 == len(digests):
            digests.append(_hash(digests[number] + array("q", self._tokens(tokens, number)).tobytes()))
        return digests[number + 1]

    def _insert(self, chain: Chain, tokens: tuple[int, ...], digest: bytes, page: int) -> Entry:
        assert page not in self._entries, f"page {page} is cached as something else"
        entry = Entry(chain.tenant, chain.last, tokens, digest, page)
        self._index[digest] = self._entries[page] = entry
        self._count(chain.tenant, +1)
        return entry

    # what the pool does

    @property
    def idle(self) -> int:
        """Cached pages that nobody holds."""
        return len(self._idle)

    def release(self, page: int) -> bool:
        """Nobody holds ``page`` any more. False when it is not cached either."""
        entry = self._entries.get(page)
        if entry is None:
            return False
        self._idle[page] = None
        self._shares[entry.tenant].idle[page] = None
        return True

    def revive(self, page: int) -> None:
        """Somebody holds an idle ``page`` again."""
        del self._idle[page]
        del self._shares[self._entries[page].tenant].idle[page]

    def evict(self) -> int:
        """Forget an idle page and give it away; there must be one."""
        idle = self._idle
        if len(self._shares) > 1:
            idle = next((self._shares[t].idle for t in self._greedy if self._shares[t].idle), idle)
        page = next(iter(idle))
        self.revive(page)
        entry = self._entries.pop(page)
        del self._index[entry.digest]
        entry.page = _EVICTED
        entry.parent = None
        self._count(entry.tenant, -1)
        self._counts["prefix_evictions"] += 1
        return page

    def _count(self, tenant: str, change: int) -> None:
        share = self._shares.setdefault(tenant, _Share())
        share.pages += change
        if share.pages > self._quota:
            self._greedy.setdefault(tenant)
        else:
            self._greedy.pop(tenant, None)
        if not share.pages:
            del self._shares[tenant]

    def check(self, refs: Sequence[int]) -> None:
        """Prove that the indexes agree with each other, and with the number of holders of each page."""
        assert self._entries == {entry.page: entry for entry in self._index.values()}, "an entry is lost"
        assert self._idle.keys() == {page for page in self._entries if not refs[page]}, "idle pages are miscounted"
        for tenant, share in self._shares.items():
            pages = [page for page, entry in self._entries.items() if entry.tenant == tenant]
            assert share.pages == len(pages), f"the share of {tenant!r} is miscounted"
            assert share.idle.keys() == self._idle.keys() & set(pages), f"idle pages of {tenant!r} are miscounted"
            assert (tenant in self._greedy) == (share.pages > self._quota), f"the quota of {tenant!r} is not applied"
        assert sum(share.pages for share in self._shares.values()) == len(self._entries), "a tenant is lost"

    def statistics(self) -> dict[str, float]:
        """Tokens that were asked for and found, pages evicted, and how many are cached now."""
        names = ("prefix_queries", "prefix_hits", "prefix_evictions")
        return {**{name: self._counts[name] for name in names}, "prefix_pages": len(self._entries)}
