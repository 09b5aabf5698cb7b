from typing import Any

import pytest

from streamengine import prefix
from streamengine.kv import KVPool
from streamengine.prefix import PrefixCache

SIZE = 2


class Cache:
    """A pool of pages with a cache, in which whole prompts come and go."""

    def __init__(self, pages: int = 16, **options: Any) -> None:
        self.cache = PrefixCache(page_size=SIZE, pages=pages, **{"secret": b"secret", **options})
        self.pool = KVPool(pages + 1, SIZE, self.cache)

    def find(self, tokens: list[int], tenant: str = "") -> int:
        return len(self.cache.find(self.cache.chain(tenant), tokens, len(tokens)))

    def serve(self, tokens: list[int], tenant: str = "") -> int:
        """Compute ``tokens`` and end; returns how many pages were found."""
        table = self.begin(tokens, tenant)
        self.pool.free(table)
        self.pool.check([])
        return self.found

    def begin(self, tokens: list[int], tenant: str = "") -> tuple[int, ...]:
        chain = self.cache.chain(tenant)
        entries = self.cache.find(chain, tokens, len(tokens))
        self.cache.enter(chain, entries, len(tokens))
        self.found = len(entries)
        shared = tuple(entry.page for entry in entries)
        self.pool.share(shared)
        taken = self.pool.take(self.pool.pages_for(len(tokens)) - len(shared))
        assert taken is not None
        table = shared + tuple(taken)
        self.cache.add(chain, tokens, table, len(tokens))
        self.pool.check(table)
        return table


def test_the_longest_run_of_full_pages_is_found():
    cache = Cache()
    cache.serve([1, 2, 3, 4, 5])
    assert cache.find([1, 2, 3, 4, 5, 6]) == 2, "the third page was not full"
    assert cache.find([1, 2, 3, 9]) == 1
    assert cache.find([1, 9, 3, 4]) == 0, "a page is nothing without those before it"


def test_a_limit_is_rounded_down_to_pages():
    cache = Cache()
    cache.serve([1, 2, 3, 4])
    assert len(cache.cache.find(cache.cache.chain(""), [1, 2, 3, 4], 3)) == 1


def test_the_same_tokens_of_two_tenants_are_two_things():
    cache = Cache()
    cache.serve([1, 2, 3, 4], "alice")
    assert cache.find([1, 2, 3, 4], "alice") == 2
    assert cache.find([1, 2, 3, 4], "bob") == 0
    assert cache.find([1, 2, 3, 4]) == 0


def test_a_name_of_a_tenant_cannot_pass_for_a_part_of_the_models_identity():
    """Each value is behind its tag and its length; and a salt can only be derived with the secret."""
    roots = [
        PrefixCache(page_size=SIZE, pages=4, identity=identity, secret=secret).chain(tenant).digests[0]
        for identity, tenant, secret in [
            (("a", "b"), "", b"1"),
            (("ab",), "", b"1"),
            (("a",), "b", b"1"),
            ((), "ab", b"1"),
            ((), "ab", b"2"),
        ]
    ]
    assert len(set(roots)) == len(roots)


def test_with_a_hash_that_always_collides_nobody_gets_anothers_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix, "_hash", lambda data: b"same")
    cache = Cache()
    cache.serve([1, 1, 1, 1], "alice")
    assert cache.find([1, 1], "alice") == 1
    assert cache.find([1, 1, 1, 1], "alice") == 1, "its second page is not the first one"
    assert cache.find([2, 2], "alice") == 0
    assert cache.find([1, 1], "bob") == 0
    cache.serve([2, 2, 2, 2], "bob")
    assert cache.find([2, 2], "bob") == 0, "a collision is not cached"


def test_equal_pages_computed_side_by_side_are_cached_once_and_both_tables_stay():
    cache = Cache()
    first = cache.begin([1, 2])
    chain = cache.cache.chain("")
    second = cache.pool.take(1)
    assert second is not None
    cache.cache.add(chain, [1, 2], second, 2)
    assert [entry.page for entry in cache.cache.find(chain, [1, 2], 2)] == [*first]
    cache.pool.free(first)
    cache.pool.free(tuple(second))
    cache.pool.check([])
    assert cache.cache.idle == 1


def test_when_the_equal_page_is_gone_the_other_ones_takes_its_place():
    cache = Cache(pages=4)
    first = cache.begin([1, 2])
    chain = cache.cache.chain("")
    table = tuple(cache.pool.take(2) or ())
    cache.cache.add(chain, [1, 2], table, 2)
    cache.pool.free(first)
    cache.pool.free(tuple(cache.pool.take(2) or ()))  # evicts it
    assert cache.find([1, 2]) == 0
    cache.cache.add(chain, [1, 2, 3, 4], table, 4)
    assert cache.find([1, 2, 3, 4]) == 2


def test_the_least_recently_used_is_evicted_first_and_a_tail_before_its_beginning():
    cache = Cache(pages=4)
    cache.serve([1, 2, 3, 4])
    cache.serve([5, 6])
    cache.serve([1, 2, 3, 4])
    cache.serve([7, 8, 9, 10])  # one page is blank, one is evicted
    assert cache.find([5, 6]) == 0 and cache.find([1, 2, 3, 4]) == 2
    cache.serve([11, 12])
    assert cache.find([1, 2, 3, 4]) == 1


def test_the_junk_of_one_tenant_does_not_evict_the_prefixes_of_another():
    cache = Cache(pages=8, quota=0.5)
    cache.serve([1, 2, 3, 4], "light")
    for junk in range(100, 200, 4):
        cache.serve([junk, junk + 1, junk + 2, junk + 3], "heavy")
    assert cache.find([1, 2, 3, 4], "light") == 2
    assert cache.cache.statistics()["prefix_pages"] == 8


def test_of_several_tenants_over_their_quota_the_first_to_be_gives_way_first():
    cache = Cache(pages=6, quota=0.2)
    for tenant, start in (("b", 0), ("c", 10), ("a", 20)):
        cache.serve([start, start + 1, start + 2, start + 3], tenant)
    cache.serve([50, 51, 52, 53], "new")
    # Each gives a page and is within its quota again.
    assert cache.find([0, 1, 2, 3], "b") == cache.find([10, 11, 12, 13], "c") == 1
    assert cache.find([20, 21, 22, 23], "a") == 2


def test_a_tenant_that_is_alone_may_fill_the_pool():
    cache = Cache(pages=8, quota=0.5)
    for start in range(0, 16, 4):
        cache.serve(list(range(start, start + 4)), "alone")
    assert all(cache.find(list(range(start, start + 4)), "alone") == 2 for start in range(0, 16, 4))


def test_statistics_count_tokens_asked_for_and_found():
    cache = Cache()
    assert cache.serve([1, 2, 3, 4, 5]) == 0
    assert cache.serve([1, 2, 3, 4, 9]) == 2
    assert cache.cache.statistics() == {
        "prefix_queries": 10,
        "prefix_hits": 4,
        "prefix_evictions": 0,
        "prefix_pages": 2,
    }
