"""The thread between a core and its peers: what it carries out, whom it drops, and that the core can sleep meanwhile.

Two workers speak over a real socket with shared memory; a peer that misbehaves is a plain socket.
"""

import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compiled.step import KVMemory
from streamengine.frames import encode, pack
from streamengine.transfer import connection, worker
from streamengine.transfer.shared_memory import SharedMemory
from streamengine.transfer.transport import Outcome, checksums
from streamengine.transfer.values import (
    Connected,
    Failed,
    Forget,
    Heartbeat,
    Hello,
    Landed,
    Lost,
    Message,
    Read,
    Received,
    Refused,
    Release,
    Send,
)
from tests.transfers import (
    PAGE_BYTES,
    POISON,
    WAIT_S,
    Core,
    card,
    core,
    memories,
    page,
    scattered,
    socket_path,
)

POISONED = bytes([POISON]) * PAGE_BYTES


@contextmanager
def two(where: str, **of_d: object) -> Iterator[tuple[Core, Core, KVMemory, KVMemory]]:
    """P listens, D connects to it; their memories."""
    with memories() as (theirs, ours), core(SharedMemory(), theirs, "P", listen_at=where) as p:
        address = p.worker.address
        assert address is not None
        with core(SharedMemory(), ours, "D", peers=[address], **of_d) as d:  # type: ignore[arg-type]
            yield p, d, theirs, ours


@pytest.fixture(params=["unix", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return socket_path(tmp_path) if request.param == "unix" else "127.0.0.1:0"


@contextmanager
def a_stranger(address: str | None) -> Iterator[socket.socket]:
    """Somebody who connects and has said nothing yet."""
    assert address is not None and address.startswith("unix:")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(address.removeprefix("unix:"))
        yield sock


def said(*messages: Message) -> bytes:
    return pack([encode(message, 2**20) for message in messages])


def is_closed(sock: socket.socket) -> bool:
    """Whatever was said before, the other end has hung up."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_pages_and_messages_go_between_two_engines_that_know_each_other(where: str) -> None:
    with two(where) as (p, d, theirs, ours):
        peer, client = d.connected(), p.connected()
        assert (peer.peer, peer.dialed, peer.card.engine) == (p.worker.address, True, "P")
        assert (client.dialed, client.card.engine) == (False, "D")
        pairs = scattered(40, seed=3)
        sums = checksums(theirs, (source for source, _ in pairs))
        d.post(
            Send(peer.peer, Heartbeat(("t",), 1.0)),
            Read("t", peer.peer, "P-1", pairs, sums),
            Send(peer.peer, Release("t")),
        )
        landed = d.until(Landed)
        assert isinstance(landed, Landed) and landed.transfer == "t" and landed.seconds >= 0
        assert all(page(ours, target) == page(theirs, source) for source, target in pairs)
        assert p.until(Received) == Received(client.peer, Heartbeat(("t",), 1.0))
        assert p.until(Received) == Received(client.peer, Release("t"))
        p.post(Send(client.peer, Refused("u", "overloaded", "later")))
        assert d.until(Received) == Received(peer.peer, Refused("u", "overloaded", "later"))


def test_a_page_that_is_not_what_the_peer_has_fails_the_transfer(tmp_path: Path) -> None:
    with two(socket_path(tmp_path)) as (_, d, _, _):
        peer = d.connected().peer
        d.post(Read("t", peer, "P-1", ((1, 1), (2, 2)), (0, 0)))
        failed = d.until(Failed)
        assert isinstance(failed, Failed) and failed.why.startswith("2 of 2 pages are not what")


def test_a_read_of_a_peer_that_is_not_there_or_has_restarted_fails_by_name(tmp_path: Path) -> None:
    with two(socket_path(tmp_path)) as (_, d, _, ours):
        peer = d.connected().peer
        d.post(
            Read("a", "nobody", "P-1", ((1, 1),)),
            Read("b", peer, "P-0", ((1, 1),)),
            Read("c", peer, "P-1", ((999, 1),)),
        )
        assert d.until(Failed) == Failed("a", "nobody is not connected")
        assert d.until(Failed) == Failed("b", f"{peer} has restarted")
        last = d.until(Failed)
        assert isinstance(last, Failed) and "page 999 of 64" in last.why
        assert page(ours, 1) == POISONED


def test_a_peer_that_ends_is_lost_and_its_next_start_is_another_incarnation(tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with memories(seeds=(1, 2, None)) as (first, second, ours), core(SharedMemory(), ours, "D", peers=[where]) as d:
        with core(SharedMemory(), first, "P", listen_at=where) as p:
            d.connected(), p.connected()
        assert d.until(lambda report: isinstance(report, Lost) and "closed" in report.why)
        with core(SharedMemory(), second, "P", incarnation="P-2", listen_at=where):
            assert d.connected().card.incarnation == "P-2"
            d.post(Read("old", where, "P-1", ((1, 1),)), Read("new", where, "P-2", ((1, 2),)))
            assert d.until(Failed) == Failed("old", f"{where} has restarted")
            d.until(Landed)
            assert (page(ours, 1), page(ours, 2)) == (POISONED, page(second, 1))


def test_the_same_failure_to_connect_is_told_once_and_tried_again(tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with memories() as (theirs, ours), core(SharedMemory(), ours, "D", peers=[where]) as d:
        lost = d.until(Lost)
        assert isinstance(lost, Lost) and lost.why == "cannot be connected to: [Errno 2] No such file or directory"
        with core(SharedMemory(), theirs, "P", listen_at=where):
            d.until(Connected)
            assert not any(isinstance(report, Lost) for report in d.seen)


def test_engines_that_differ_say_in_what_and_do_not_speak(tmp_path: Path) -> None:
    with two(socket_path(tmp_path), page_size=32) as (p, d, _, _):
        lost = d.until(Lost)
        assert isinstance(lost, Lost)
        assert (lost.mismatch, lost.why) == (True, "page_size here 32, there 4")
        told = p.until(Lost)
        assert isinstance(told, Lost) and told.mismatch and told.why == "page_size here 4, there 32"


def test_an_engine_does_not_take_itself_for_a_peer(tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with memories() as (theirs, _), core(SharedMemory(), theirs, "P", listen_at=where, peers=[where]) as p:
        lost = p.until(Lost)
        assert isinstance(lost, Lost) and lost.why == "it is engine 'P', as we are"


def test_a_second_connection_of_an_engine_takes_the_place_of_its_first(tmp_path: Path) -> None:
    with two(socket_path(tmp_path)) as (p, _, _, _):
        first = p.connected().peer
        with a_stranger(p.worker.address) as sock:
            sock.sendall(said(Hello(card(SharedMemory(), "D", "D-2"))))
            lost = p.until(Lost)
            assert isinstance(lost, Lost) and (lost.peer, lost.why) == (first, "another connection of D took its place")
            assert p.connected().card.incarnation == "D-2"


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "out of step"),
        (struct.pack("!I", connection.MAX_HELLO_BYTES + 1), "out of step"),
        (struct.pack("!I", 3) + b"\xc1\xc1\xc1", "cannot be decoded"),
        (pack([msgspec.Raw(msgspec.msgpack.encode({"type": "hello", "card": 7}))]), "cannot be decoded"),
        (said(Release("t")), "said release where that has no place"),
        (
            said(Hello(card(SharedMemory(), "X")), Hello(card(SharedMemory(), "X"))),
            "said hello where that has no place",
        ),
        (b"", "closed by the other end"),
        (b"\0\0", "in the middle of a frame"),
    ],
)
def test_a_stranger_who_speaks_garbage_is_dropped_and_nobody_else_notices(
    tmp_path: Path, garbage: bytes, complaint: str
) -> None:
    with two(socket_path(tmp_path)) as (p, d, theirs, ours):
        peer = d.connected().peer
        p.connected()
        with a_stranger(p.worker.address) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            lost = p.until(Lost)
            assert isinstance(lost, Lost) and complaint in lost.why
            assert is_closed(sock)
        d.post(Read("t", peer, "P-1", ((3, 4),)), Send(peer, Release("t")))
        d.until(Landed)
        assert page(ours, 4) == page(theirs, 3)
        report = p.until(Received)
        assert isinstance(report, Received) and report.message == Release("t")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_strangers_say_the_worker_works_on(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    good = said(Hello(card(SharedMemory(), "X")), Release("t"), Heartbeat(("t",), 1.0))
    with two(socket_path(tmp_path)) as (p, d, theirs, ours):
        peer = d.connected().peer
        for _ in range(40):
            words = bytearray(good)
            for _ in range(draw.randrange(1, 20)):
                words[draw.randrange(len(words))] = draw.randrange(256)
            with a_stranger(p.worker.address) as sock:
                sock.sendall(words[: draw.randrange(1, len(words) + 1)])
        d.post(Read("t", peer, "P-1", ((3, 4),)), Send(peer, Release("end")))
        d.until(Landed)
        assert page(ours, 4) == page(theirs, 3)
        p.until(lambda report: isinstance(report, Received) and report.message == Release("end"))


def test_an_address_that_cannot_be_mapped_makes_a_lost_peer_not_a_dead_worker(tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with (
        memories() as (_, ours),
        closing(connection.listen(where)) as listener,
        core(SharedMemory(), ours, "D", peers=[where]) as d,
    ):
        listener.setblocking(True)
        listener.settimeout(WAIT_S)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(said(Hello(card(SharedMemory(), "P"))))
            lost = d.until(Lost)
            assert isinstance(lost, Lost) and "not an address of shared memory" in lost.why
        peer, _ = listener.accept()  # it tries again
        peer.close()


def test_one_who_connects_and_says_nothing_is_dropped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HELLO_S", 0.05)
    with two(socket_path(tmp_path)) as (p, d, _, _):
        d.connected()
        p.connected()
        with a_stranger(p.worker.address) as sock:
            lost = p.until(Lost)
            assert isinstance(lost, Lost) and lost.why == "no word within 0.05 s"
            assert is_closed(sock)


def test_idle_strangers_keep_no_engine_out(tmp_path: Path) -> None:
    """The oldest of them goes for each newcomer; none that has said who it is does."""
    where = socket_path(tmp_path)
    with ExitStack() as stack:
        theirs, ours = stack.enter_context(memories())
        p = stack.enter_context(core(SharedMemory(), theirs, "P", listen_at=where))
        first = stack.enter_context(a_stranger(where))
        first.sendall(said(Hello(card(SharedMemory(), "X"))))
        p.connected()
        idle = [stack.enter_context(a_stranger(where)) for _ in range(100)]
        d = stack.enter_context(core(SharedMemory(), ours, "D", peers=[where]))
        assert d.connected().card.engine == "P"
        client = p.connected()
        assert client.card.engine == "D"
        assert all(is_closed(sock) for sock in idle[: -worker.MAX_STRANGERS])
        p.post(Send(client.peer, Refused("t", "overloaded", "later")))
        assert d.until(Received)
        p.quiet()


@pytest.mark.parametrize("where", ["unix", "tcp"], indirect=True)
def test_engines_that_have_the_same_key_speak(where: str) -> None:
    with memories() as (theirs, ours), core(SharedMemory(), theirs, "P", listen_at=where, key="a secret") as p:
        address = p.worker.address
        assert address is not None
        with core(SharedMemory(), ours, "D", peers=[address], key="a secret") as d:
            assert (d.connected().card.engine, p.connected().card.engine) == ("P", "D")
            d.post(Read("t", address, "P-1", ((1, 2),)))
            d.until(Landed)
            assert page(ours, 2) == page(theirs, 1)


@pytest.mark.parametrize(
    ("of_p", "of_d", "p_says", "d_says"),
    [
        ("a secret", None, "it has no peer_key, and here is one", "it wants a peer_key, and here is none"),
        (None, "a secret", "it wants a peer_key, and here is none", "it has no peer_key, and here is one"),
        ("a secret", "another", "its peer_key is another than ours", "its peer_key is another than ours"),
    ],
)
def test_engines_that_have_not_the_same_key_say_so_and_do_not_speak(
    tmp_path: Path, of_p: str | None, of_d: str | None, p_says: str, d_says: str
) -> None:
    where = socket_path(tmp_path)
    with (
        memories() as (theirs, ours),
        core(SharedMemory(), theirs, "P", listen_at=where, key=of_p) as p,
        core(SharedMemory(), ours, "D", peers=[where], key=of_d) as d,
    ):
        for one, says in ((p, p_says), (d, d_says)):
            lost = one.until(lambda report: isinstance(report, Lost) and report.mismatch)
            assert isinstance(lost, Lost) and lost.why == says
            assert not any(isinstance(report, Connected) for report in one.seen)


def test_a_peer_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_OUTBOX_BYTES", 2**20)
    where = socket_path(tmp_path)
    with ExitStack() as stack:
        theirs, _ = stack.enter_context(memories())
        p = stack.enter_context(core(SharedMemory(), theirs, "P", listen_at=where))
        with a_stranger(where) as sock:
            sock.sendall(said(Hello(card(SharedMemory(), "D"))))
            client = p.connected().peer
            p.post(*[Send(client, Refused("t", "overloaded", "x" * 2**16))] * 64)
            lost = p.until(Lost)
            assert isinstance(lost, Lost) and "wait to be read" in lost.why


def test_while_the_core_does_not_poll_a_peer_cannot_fill_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_REPORTS", 10)
    where = socket_path(tmp_path)
    with ExitStack() as stack:
        theirs, _ = stack.enter_context(memories())
        p = stack.enter_context(core(SharedMemory(), theirs, "P", listen_at=where))
        with a_stranger(where) as sock:
            sock.sendall(said(Hello(card(SharedMemory(), "D"))))
            p.connected()
            sock.setblocking(False)
            sent, frame = 0, said(Heartbeat(("t" * 200,), 1.0))
            try:
                while True:
                    sent += sock.send(frame * 100)
            except BlockingIOError:
                pass
            sock.setblocking(True)
            received = 0
            while received < sent // len(frame):
                report = p.until(Received)
                received += 1
            assert isinstance(report, Received)


def test_what_a_lost_peer_had_begun_to_give_still_lands(tmp_path: Path) -> None:
    """The memory of a dead engine is what it was: the copy of it goes on."""

    class Gated(SharedMemory):
        begun, opened = threading.Event(), threading.Event()

        def read(self, *of_what: Any) -> None:
            super().read(*of_what)
            self.begun.set()

        def poll(self) -> list[Outcome]:
            return super().poll() if self.opened.is_set() else []

    where, sink = socket_path(tmp_path), Gated()
    with memories() as (theirs, ours), core(sink, ours, "D", peers=[where]) as d:
        with core(SharedMemory(), theirs, "P", listen_at=where):
            d.connected()
            pairs = scattered(60, seed=5)
            d.post(Read("t", where, "P-1", pairs))
            assert sink.begun.wait(WAIT_S)
        assert d.until(lambda report: isinstance(report, Lost) and "closed" in report.why)
        sink.opened.set()
        d.until(Landed)
        assert all(page(ours, target) == page(theirs, source) for source, target in pairs)
        d.post(Read("u", where, "P-1", pairs))
        d.until(Failed)


def test_a_peer_that_is_forgotten_is_connected_to_again(tmp_path: Path) -> None:
    with two(socket_path(tmp_path)) as (_, d, _, _):
        peer = d.connected().peer
        d.post(Forget(peer), Forget("nobody"), Send(peer, Release("t")), Read("t", peer, "P-1", ((1, 1),)))
        assert d.until(Lost) == Lost(peer, "forgotten")
        assert d.until(Failed) == Failed("t", f"{peer} is not connected")
        assert d.connected().peer == peer


def test_a_socket_that_a_killed_process_left_is_replaced_but_not_one_that_is_in_use(tmp_path: Path) -> None:
    where = socket_path(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(where.removeprefix("unix:"))
    with closing(connection.listen(where)), pytest.raises(OSError, match="in use"):
        connection.listen(where)


def test_an_address_that_cannot_be_had_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("file", "already in use"), ("no/folder", "No such file")):
        with pytest.raises(OSError, match=re.escape(f"unix:{tmp_path}/{name} cannot be listened on: ") + f".*{why}"):
            connection.listen(f"unix:{tmp_path}/{name}")


@pytest.mark.parametrize("address", ["", "nonsense", ":80", "host:", "host:http"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match="neither unix:PATH nor HOST:PORT"):
        connection.listen(address)


def test_a_connection_that_cannot_be_taken_in_is_tried_again_later_and_not_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, looks, looked, moves = [100.0], list[float](), threading.Event(), SharedMemory()

    def without_descriptors(listener: socket.socket, now: float) -> connection.Connection | None:
        looks.append(now)
        looked.set()
        return None if now < 101 else connection.accept(listener, now)

    monkeypatch.setattr(worker, "accept", without_descriptors)
    listener = connection.listen(socket_path(tmp_path))
    with (
        memories() as (ours, _),
        closing(
            worker.Worker(
                card(moves, "P"),
                ours,
                moves,
                listener=listener,
                clock=lambda: times[-1],
            )
        ) as p,
        a_stranger(p.address) as stranger,
    ):
        assert looked.wait(WAIT_S)
        for _ in range(20):
            p.post([Forget("nobody")])
        times.append(101.0)
        assert stranger.recv(65536)
        assert looks[0] == 100
        assert looks.count(100) == 1


def test_our_own_bug_in_the_thread_reaches_the_core(tmp_path: Path) -> None:
    class Broken(SharedMemory):
        def poll(self) -> list[Outcome]:
            if self._copies:
                raise ZeroDivisionError("a bug")
            return super().poll()

    where = socket_path(tmp_path)
    with (
        memories() as (theirs, ours),
        core(SharedMemory(), theirs, "P", listen_at=where),
        core(Broken(), ours, "D", peers=[where]) as d,
    ):
        d.connected()
        d.post(Read("t", where, "P-1", ((1, 1),)))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            d.until(Landed)
