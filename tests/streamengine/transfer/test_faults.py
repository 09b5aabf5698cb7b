"""What becomes of a transfer when the other engine is killed, stopped or starts again: with real processes.

Whatever happens, a read ends at most once, nothing writes into its pages after that, and reads of others go on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from compiled.step import KVMemory
from streamengine.transfer.values import Connected, Failed, Forget, Landed, Lost, Read
from tests.transfer_peer import make_transport
from tests.transfers import NIXL, POISON, Core, core, make_memory, memories, no_nixl, page, scattered, socket_path

ROOT = Path(__file__).resolve().parents[3]
PAGES, PAGE_BYTES = 64, 2**20
"""64 MiB: some parts of a read over TCP."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=["shared_memory", "nixl", "nixl over tcp"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param.startswith("nixl"):
        if reason := no_nixl():
            pytest.skip(reason)
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        if request.param.endswith("tcp"):
            monkeypatch.setenv("UCX_TLS", "tcp")
    return str(request.param)


@contextmanager
def engine(kind: str, address: str, *, seed: int = 1, incarnation: str = "P-1") -> Iterator[subprocess.Popen[str]]:
    name = kind.partition(" ")[0]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.transfer_peer",
            name,
            address,
            str(seed),
            incarnation,
            str(PAGES),
            str(PAGE_BYTES),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}:{NIXL}"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline(), "it did not start"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()


@contextmanager
def reader(kind: str, *peers: str) -> Iterator[tuple[Core, KVMemory]]:
    with ExitStack() as stack:
        (ours,) = stack.enter_context(memories(PAGES, PAGE_BYTES, seeds=(None,)))
        d = stack.enter_context(core(make_transport(kind.partition(" ")[0]), ours, "D", peers=peers))
        for number, peer in enumerate([d.connected() for _ in peers]):
            d.post(Read(f"first-{number}", peer.peer, peer.card.incarnation, ((1, 1),)))
            assert isinstance(ended(d, f"first-{number}"), Landed)
        give_away(ours, ((1, 1),))
        yield d, ours


@pytest.fixture(scope="module")
def theirs() -> Iterator[KVMemory]:
    """What an engine of seed 1 has."""
    memory = make_memory(PAGES, PAGE_BYTES, 1)
    yield memory
    assert memory.descriptor is not None
    os.close(memory.descriptor)


def give_away(ours: KVMemory, pairs: tuple[tuple[int, int], ...]) -> None:
    for _, target in pairs:
        ours.view[target * PAGE_BYTES :][:PAGE_BYTES] = bytes([POISON]) * PAGE_BYTES


def untouched(ours: KVMemory, pairs: tuple[tuple[int, int], ...]) -> bool:
    return all(page(ours, target) == bytes([POISON]) * PAGE_BYTES for _, target in pairs)


def ended(d: Core, transfer: str, limit_s: float = 30.0) -> Landed | Failed:
    report = d.until(lambda report: isinstance(report, Landed | Failed) and report.transfer == transfer, limit_s)
    assert isinstance(report, Landed | Failed)
    return report


def nothing_ends(d: Core, seconds: float) -> bool:
    """No read is reported for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            d.until(lambda report: isinstance(report, Landed | Failed), end - time.monotonic())
        except AssertionError:
            return True
        return False
    return True


def test_an_engine_that_was_killed_is_lost_at_once_and_read_no_more(kind: str, tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with engine(kind, where) as p, reader(kind, where) as (d, ours):
        p.kill()
        d.until(Lost, 10.0)
        pairs = scattered(30, seed=1)
        d.post(Read("t", where, "P-1", pairs))
        assert isinstance(ended(d, "t", 10.0), Failed)
        assert untouched(ours, pairs)


def test_killed_while_it_is_read_a_read_ends_and_its_pages_can_be_given_away(
    kind: str, tmp_path: Path, theirs: KVMemory
) -> None:
    """Stopped first, so that the read is in flight in any case."""
    where = socket_path(tmp_path)
    with engine(kind, where) as p, reader(kind, where) as (d, ours):
        pairs = scattered(60, seed=2)
        p.send_signal(signal.SIGSTOP)
        d.post(Read("t", where, "P-1", pairs))
        p.kill()
        end = ended(d, "t")
        if isinstance(end, Landed):  # the memory did not need its engine
            assert kind != "nixl over tcp"
            assert all(page(ours, target) == page(theirs, source) for source, target in pairs)
        give_away(ours, pairs)
        assert nothing_ends(d, 1.0)
        assert untouched(ours, pairs)


def test_while_an_engine_is_stopped_its_read_has_no_end_or_a_good_one_and_others_go_on(
    kind: str, tmp_path: Path, theirs: KVMemory
) -> None:
    where, elsewhere = socket_path(tmp_path), f"{socket_path(tmp_path)}2"
    with ExitStack() as stack:
        p = stack.enter_context(engine(kind, where))
        stack.enter_context(engine(kind, elsewhere, incarnation="Q-1"))
        d, ours = stack.enter_context(reader(kind, where, elsewhere))
        pairs = scattered(60, seed=3)
        stopped, other = pairs[:30], pairs[30:]
        p.send_signal(signal.SIGSTOP)
        d.post(Read("stopped", where, "P-1", stopped), Read("other", elsewhere, "Q-1", other))
        first = d.until(Landed)
        assert isinstance(first, Landed)
        if kind == "nixl over tcp":
            assert first.transfer == "other"
            assert nothing_ends(d, 2.0)
            p.send_signal(signal.SIGCONT)
            assert isinstance(ended(d, "stopped"), Landed)
        else:
            d.until(Landed)  # nobody's help was needed
        assert all(page(ours, target) == page(theirs, source) for source, target in pairs)


def test_a_connection_that_is_closed_on_a_stopped_engine_leaves_its_read_its_pages_until_it_ends(
    kind: str, tmp_path: Path
) -> None:
    """The engine wakes long after everybody has gone on: what it writes then, it writes where nobody else is."""
    where = socket_path(tmp_path)
    with engine(kind, where) as p, reader(kind, where) as (d, ours):
        pairs = scattered(60, seed=4)
        p.send_signal(signal.SIGSTOP)
        d.post(Read("t", where, "P-1", pairs))
        if kind == "nixl over tcp":
            assert nothing_ends(d, 1.0)
        d.post(Forget(where))
        d.until(Lost)
        p.send_signal(signal.SIGCONT)
        end = ended(d, "t")
        give_away(ours, pairs)
        assert nothing_ends(d, 1.0)
        assert untouched(ours, pairs), end


def test_an_engine_that_starts_again_is_read_again_with_what_it_has_now(kind: str, tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with ExitStack() as stack:
        first = stack.enter_context(engine(kind, where))
        d, ours = stack.enter_context(reader(kind, where))
        pairs = scattered(20, seed=5)
        d.post(Read("a", where, "P-1", pairs))
        assert isinstance(ended(d, "a"), Landed)
        first.kill()
        d.until(Lost)
        stack.enter_context(engine(kind, where, seed=2, incarnation="P-2"))
        again = d.until(Connected)
        assert isinstance(again, Connected) and again.card.incarnation == "P-2"
        d.post(Read("b", where, "P-1", pairs), Read("c", where, "P-2", pairs))
        assert isinstance(ended(d, "b"), Failed)
        assert isinstance(ended(d, "c"), Landed)
        now = stack.enter_context(memories(PAGES, PAGE_BYTES, seeds=(2,)))[0]
        assert all(page(ours, target) == page(now, source) for source, target in pairs)


def test_after_idling_a_transfer_goes_as_before(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the time for which an engine expects to be read."""
    monkeypatch.setattr("streamengine.transfer.nixl.EXPECT_S", 0.1)
    where = socket_path(tmp_path)
    with engine(kind, where), reader(kind, where) as (d, _):
        for name in ("a", "b"):
            d.post(Read(name, where, "P-1", scattered(60, seed=6)))
            assert isinstance(ended(d, name), Landed)
            assert nothing_ends(d, 1.0)
