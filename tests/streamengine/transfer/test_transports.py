"""What every transport promises, whatever it moves pages with. Two of them in one process, each with a memory."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from compiled.step import KVMemory
from streamengine.transfer.in_process import InProcess
from streamengine.transfer.nixl import Nixl
from streamengine.transfer.shared_memory import SharedMemory
from streamengine.transfer.transport import Transport, TransportError, checksums
from tests.transfers import (
    PAGE_BYTES,
    PAGES,
    POISON,
    make_memory,
    memories,
    no_nixl,
    page,
    scattered,
    until_ended,
)

POISONED = bytes([POISON]) * PAGE_BYTES
Make = Callable[[], Transport]


@pytest.fixture(params=["in_process", "shared_memory", pytest.param("nixl", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    if request.param == "nixl":
        if reason := no_nixl():
            pytest.skip(reason)
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        return Nixl
    return SharedMemory if request.param == "shared_memory" else InProcess


@dataclass
class Pair:
    """``sink`` reads from ``source``, which it knows as "P-1"."""

    source: Transport
    sink: Transport
    theirs: KVMemory
    ours: KVMemory
    address: bytes

    def read(self, *transfers: str, count: int = 20) -> dict[str, tuple[tuple[int, int], ...]]:
        """Begin reads of pages that no two of them share."""
        pairs = scattered(count * len(transfers), seed=7)
        parts = {name: pairs[i :: len(transfers)] for i, name in enumerate(transfers)}
        for name, part in parts.items():
            self.sink.read(name, "P-1", part)
        return parts

    def ended(self, count: int = 1) -> dict[str, str]:
        return dict(until_ended(self.sink, count, self.source))


@pytest.fixture
def pair(make: Make) -> Iterator[Pair]:
    with memories() as (theirs, ours):
        source, sink = make(), make()
        address = source.register(theirs)
        sink.register(ours)
        sink.connect("P-1", address)
        source.expect()
        yield Pair(source, sink, theirs, ours, address)
        sink.close()
        source.close()


def test_scattered_pages_land_where_they_were_told_to_and_nothing_else_changes(pair: Pair) -> None:
    before = checksums(pair.theirs, range(PAGES))
    parts = pair.read("a", "b", "c")
    assert pair.ended(3) == {"a": "", "b": "", "c": ""}
    landed = {target: source for part in parts.values() for source, target in part}
    assert len(landed) == 60
    for target in range(PAGES):
        expected = page(pair.theirs, landed[target]) if target in landed else POISONED
        assert page(pair.ours, target) == expected, f"page {target}"
    assert checksums(pair.theirs, range(PAGES)) == before
    assert pair.sink.poll() == []


def test_a_read_of_no_pages_ends_well(pair: Pair) -> None:
    pair.sink.read("a", "P-1", ())
    assert pair.ended() == {"a": ""}


def test_a_page_that_is_in_no_pool_is_refused_before_anything_is_copied(pair: Pair) -> None:
    pair.sink.read("a", "P-1", ((1, 1), (PAGES, 2)))
    pair.sink.read("b", "P-1", ((1, 1), (2, PAGES)))
    ends = pair.ended(2)
    assert ends["a"] == f"page {PAGES} of {PAGES} there cannot be page 2 of {PAGES} here"
    assert ends["b"] == f"page 2 of {PAGES} there cannot be page {PAGES} of {PAGES} here"
    assert page(pair.ours, 1) == POISONED


def test_a_source_that_is_unknown_or_forgotten_is_not_read(pair: Pair) -> None:
    pair.sink.forget("P-1")
    pair.sink.forget("nobody")
    pair.sink.read("a", "P-1", ((1, 1),))
    pair.sink.read("b", "P-2", ((1, 1),))
    ends = pair.ended(2)
    assert "P-1" in ends["a"] and "P-2" in ends["b"]
    assert page(pair.ours, 1) == POISONED


def test_a_source_that_was_forgotten_can_be_connected_to_again(pair: Pair) -> None:
    pair.sink.forget("P-1")
    pair.sink.poll()
    pair.sink.connect("P-1", pair.address)
    pair.sink.connect("P-1", pair.address)  # twice is once
    pair.read("a")
    assert pair.ended() == {"a": ""}


def test_what_is_in_flight_when_its_source_is_forgotten_ends_once_and_writes_nothing_afterwards(pair: Pair) -> None:
    parts = pair.read("a", count=60)
    pair.sink.forget("P-1")
    ends = pair.ended()
    assert list(ends) == ["a"]
    for _, target in parts["a"]:  # the pages are given away
        pair.ours.view[target * PAGE_BYTES :][:PAGE_BYTES] = POISONED
    for _ in range(100):
        assert pair.sink.poll() == []
        pair.source.poll()
    assert all(page(pair.ours, target) == POISONED for _, target in parts["a"])


def test_nothing_is_written_after_a_transport_was_closed(pair: Pair) -> None:
    pair.read("a", count=60)
    pair.sink.close()
    before = checksums(pair.ours, range(PAGES))
    for _ in range(100):
        pair.source.poll()
    assert checksums(pair.ours, range(PAGES)) == before


def test_a_restarted_source_is_another_source(pair: Pair, make: Make) -> None:
    pair.read("a")
    pair.ended()
    pair.sink.forget("P-1")
    pair.source.close()
    again, memory = make(), make_memory(seed=2)
    pair.sink.connect("P-2", again.register(memory))
    again.expect()
    pair.sink.read("b", "P-2", ((5, 6),))
    assert until_ended(pair.sink, 1, again) == [("b", "")]
    assert page(pair.ours, 6) == page(memory, 5)
    assert memory.descriptor is not None
    os.close(memory.descriptor)
    again.close()


@pytest.mark.parametrize("address", [b"", b"\xc1", b"\x96" + b"\x01" * 6])
def test_an_address_that_is_none_is_an_error_in_one_line(pair: Pair, address: bytes) -> None:
    with pytest.raises(TransportError) as raised:
        pair.sink.connect("P-2", address)
    assert "\n" not in str(raised.value)


def test_pages_of_another_size_are_refused_with_both_sizes(make: Make) -> None:
    with memories() as (theirs, _), memories(PAGES // 2, 2 * PAGE_BYTES) as (_, ours):
        source, sink = make(), make()
        address = source.register(theirs)
        sink.register(ours)
        with pytest.raises(TransportError, match=f"{PAGE_BYTES} bytes, here {2 * PAGE_BYTES}"):
            sink.connect("P-1", address)
        sink.close()
        source.close()


def test_one_that_has_nothing_to_do_asks_for_no_time(make: Make) -> None:
    with memories() as (_, ours):
        transport = make()
        transport.register(ours)
        assert transport.pause() is None
        transport.close()


def test_a_cache_that_is_in_no_shared_memory_is_refused_by_name() -> None:
    with pytest.raises(TransportError, match="not in shared memory"):
        SharedMemory().register(KVMemory(memoryview(bytearray(64)), 1, 64))


def test_the_memory_of_a_process_that_is_gone_cannot_be_mapped_by_its_number() -> None:
    """Its number, or that of its descriptor, may be another's by now."""
    with memories() as (theirs, ours):
        source, sink = SharedMemory(), SharedMemory()
        address = source.register(theirs)
        sink.register(ours)
        assert theirs.descriptor is not None
        other = make_memory(seed=9)
        assert other.descriptor is not None
        os.dup2(other.descriptor, theirs.descriptor)
        with pytest.raises(TransportError, match="is not the memory that its engine told of"):
            sink.connect("P-1", address)
        os.close(other.descriptor)


def test_memory_that_could_shrink_while_it_is_read_is_not_mapped() -> None:
    """Reading beyond its end would kill this process."""
    with memories() as (theirs, ours):
        source, sink = SharedMemory(), SharedMemory()
        descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, theirs.view.nbytes)
        address = source.register(replace(theirs, descriptor=descriptor))
        sink.register(ours)
        with pytest.raises(TransportError, match="not sealed"):
            sink.connect("P-1", address)
        os.close(descriptor)


def test_shared_memory_can_be_read_when_its_engine_is_gone() -> None:
    with memories() as (theirs, ours):
        source, sink = SharedMemory(), SharedMemory()
        address = source.register(theirs)
        sink.register(ours)
        sink.connect("P-1", address)
        source.close()
        sink.read("a", "P-1", ((3, 4),))
        assert until_ended(sink, 1) == [("a", "")]
        assert page(ours, 4) == page(theirs, 3)


def test_the_memory_of_an_engine_in_another_process_is_refused_by_both_numbers_and_never_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = """
from compiled.step import KVMemory
from streamengine.transfer.in_process import InProcess
print(InProcess().register(KVMemory(memoryview(bytearray(64)), 1, 64)).hex())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    with memories() as (theirs, ours):
        source, sink = InProcess(), InProcess()
        here = source.register(theirs)
        sink.register(ours)
        with pytest.raises(TransportError, match=rf"in process \d+, not in ours, {os.getpid()}"):
            sink.connect("P-1", bytes.fromhex(told.stdout))
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a fork, which has the name and old copies of the memory
        with pytest.raises(TransportError, match="not in ours, 1,"):
            sink.connect("P-1", here)


def test_an_engine_of_this_process_that_was_closed_cannot_be_met_though_others_came_after_it() -> None:
    with memories() as (theirs, ours):
        gone, sink = InProcess(), InProcess()
        address = gone.register(theirs)
        gone.close()
        sink.register(ours)
        with pytest.raises(TransportError, match="not registered any more"):
            sink.connect("P-1", address)
        sink.close()
