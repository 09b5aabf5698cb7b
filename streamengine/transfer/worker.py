"""The worker's half of a connector: one thread that owns the control sockets and the transport, and decides nothing.

The core posts orders and polls reports; neither blocks. `fileno` becomes readable when reports wait, so that a core
which sleeps in `select` wakes. Messages are bounded, a peer that sends anything else than messages is dropped, one that
does not read is dropped, and while the core does not poll nothing more is read from anybody.
"""

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from compiled.step import KVMemory
from streamengine.frames import LinkClosed
from streamengine.transfer.connection import Connection, accept, dial, unlisten
from streamengine.transfer.greeting import Greeting, Unfit
from streamengine.transfer.transport import Transport, TransportError, checksums
from streamengine.transfer.values import (
    Card,
    Connected,
    Failed,
    Forget,
    Landed,
    Lost,
    Message,
    Order,
    Read,
    Received,
    Report,
    Send,
    Words,
)

MAX_ACCEPTED, MAX_STRANGERS = 256, 16
"""Connections of others to us: of those that have said who they are, and of those that have not yet."""

MAX_REPORTS = 4096
"""So many wait before no more is read from peers."""

HELLO_S = 5.0
"""So long may it take to connect, and then to say hello."""

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
"""A peer that cannot be connected to is tried again after the first, then twice as long, up to the last."""

GOODBYE_S = 5.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """``address`` is of one that we connect to."""

    name: str
    address: str | None = None
    connection: Connection | None = None
    greeting: Greeting | None = None
    due: float = 0.0
    delay: float = FIRST_RETRY_S
    told: str = ""

    @property
    def card(self) -> Card | None:
        return None if self.connection is None else self.connection.card


class Worker:
    """
    Args:
        card: who this engine is; its ``address`` is filled in here.
        memory: the KV cache, from and to which pages move.
        transport: not registered yet.
        listener: where others connect to, see `connection.listen`; it is closed with this.
        peers: addresses of those to connect to, again and again.
        key: that an engine must have which connects to us or which we connect to; None: anybody may.

    Raises:
        TransportError: this memory cannot be reached.
    """

    def __init__(
        self,
        card: Card,
        memory: KVMemory,
        transport: Transport,
        *,
        listener: socket.socket | None = None,
        peers: Sequence[str] = (),
        key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._transport, self._clock = memory, transport, clock
        self._card = msgspec.structs.replace(card, address=transport.register(memory))
        self._key = key
        self._peers = {address: _Peer(address, address) for address in peers}
        self._named = 0
        self._reads: dict[str, tuple[Read, float]] = {}
        self._orders: deque[Order] = deque()
        self._reports: deque[Report] = deque()
        self._accept_at = 0.0
        self._full = False
        self._closing = False
        self._error: Exception | None = None
        self._listener = listener
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="streamengine-transfer", daemon=True)
        self._thread.start()

    # the core's side

    @property
    def address(self) -> str | None:
        """Where others connect to."""
        if self._listener is None:
            return None
        where = self._listener.getsockname()
        return f"unix:{where}" if isinstance(where, str) else f"{where[0]}:{where[1]}"

    def post(self, orders: Sequence[Order]) -> None:
        """Have ``orders`` carried out, in order. Never blocks."""
        if orders:
            self._orders.extend(orders)
            os.eventfd_write(self._wake, 1)

    def poll(self) -> list[Report]:
        """What was done since the last call, in order. Never blocks.

        Raises:
            Exception: our own bug in the thread, which has ended.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        full = len(self._reports) >= MAX_REPORTS
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        if full:
            os.eventfd_write(self._wake, 1)
        if not reports and self._error is not None:
            raise self._error
        return reports

    def fileno(self) -> int:
        """Readable when there is something to poll."""
        return self._ready

    def close(self) -> None:
        """Every connection ends, and nothing is written into the memory any more."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(GOODBYE_S)
        if self._thread.is_alive():
            _logger.error("the thread of transfers did not end within %g s", GOODBYE_S)
            return
        os.close(self._wake)
        os.close(self._ready)

    # the thread's side

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey()
                self._retry()
                self._collect()
                self._serve(self._select())
        except Exception as error:
            _logger.exception("transfers have ended")
            self._error = error
            os.eventfd_write(self._ready, 1)
        finally:
            self._end()

    def _end(self) -> None:
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.sock.close()
        if self._listener is not None:
            unlisten(self._listener)
        self._selector.close()
        self._transport.close()

    def _tell(self, report: Report) -> None:
        self._reports.append(report)
        os.eventfd_write(self._ready, 1)

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            match order:
                case Send():
                    peer = self._peers.get(order.peer)
                    if peer is not None and peer.card is not None:
                        self._send(peer, order.message)
                        if peer.address is None:
                            self._transport.expect()
                case Read():
                    self._read(order)
                case Forget():
                    peer = self._peers.get(order.peer)
                    if peer is not None and peer.connection is not None:
                        self._drop(peer, "forgotten")

    def _read(self, order: Read) -> None:
        assert order.transfer not in self._reads, f"transfer {order.transfer} is being read"
        peer = self._peers.get(order.peer)
        if peer is None or peer.card is None:
            self._tell(Failed(order.transfer, f"{order.peer} is not connected"))
        elif peer.card.incarnation != order.incarnation:
            self._tell(Failed(order.transfer, f"{order.peer} has restarted"))
        else:
            self._reads[order.transfer] = order, self._clock()
            self._transport.read(order.transfer, order.incarnation, order.pairs)

    def _collect(self) -> None:
        for transfer, why in self._transport.poll():
            order, began = self._reads.pop(transfer)
            if not why and order.checksums is not None:
                found = checksums(self._memory, (target for _, target in order.pairs))
                if wrong := sum(a != b for a, b in zip(found, order.checksums, strict=False)):
                    why = f"{wrong} of {len(found)} pages are not what {order.peer} has"
            self._tell(Failed(transfer, why) if why else Landed(transfer, self._clock() - began))

    def _select(self) -> list[tuple[object, int]]:
        """Wait until there is something to do; ``(file, events)``."""
        now = self._clock()
        pause = self._transport.pause()
        times = [] if pause is None else [now + pause]
        hearing = selectors.EVENT_READ if len(self._reports) < MAX_REPORTS else 0
        if self._listener is not None:
            deaf = now < self._accept_at
            self._watch(self._listener, 0 if deaf else selectors.EVENT_READ, None)
            if deaf:
                times.append(self._accept_at)
        for peer in self._peers.values():
            connection = peer.connection
            if connection is None:
                times.append(peer.due)
                continue
            if connection.card is None:
                times.append(connection.since + HELLO_S)
            wanted = (selectors.EVENT_WRITE if connection.wants_to_write else 0) | hearing
            self._watch(connection.sock, wanted, peer)
        ready = self._selector.select(max(0.0, min(times) - now) if times else None)
        return [(key.data or key.fileobj, events) for key, events in ready]

    def _watch(self, sock: socket.socket, wanted: int, peer: _Peer | None) -> None:
        known = self._selector.get_map().get(sock)
        if known is None:
            if wanted:
                self._selector.register(sock, wanted, peer)
        elif not wanted:
            self._selector.unregister(sock)
        elif known.events != wanted:
            self._selector.modify(sock, wanted, peer)

    def _serve(self, ready: list[tuple[object, int]]) -> None:
        for what, events in ready:
            if isinstance(what, _Peer):
                self._exchange(what, events)
            elif what == self._wake:
                os.eventfd_read(self._wake)
            elif self._listener is not None:
                self._accept(self._listener)

    # connections

    def _accept(self, listener: socket.socket) -> None:
        connection = accept(listener, self._clock())
        if connection is None:  # perhaps for want of descriptors: it stays there, and looking again at once is a spin
            self._accept_at = self._clock() + FIRST_RETRY_S
            return
        accepted = [peer for peer in self._peers.values() if peer.address is None]
        strangers = [peer for peer in accepted if peer.card is None]
        if len(accepted) - len(strangers) >= MAX_ACCEPTED:
            if not self._full:
                _logger.warning("connections beyond %d are refused", MAX_ACCEPTED)
            self._full = True
            connection.sock.close()
            return
        self._full = False
        if len(strangers) >= MAX_STRANGERS:
            self._hang_up(strangers[0])  # the oldest; the core has never heard of it
            del self._peers[strangers[0].name]
        self._named += 1
        peer = _Peer(f"accepted-{self._named}", connection=connection)
        self._peers[peer.name] = peer
        self._begin(peer)

    def _retry(self) -> None:
        """Connect to those whose time has come, and give up on those who do not speak."""
        now = self._clock()
        for peer in list(self._peers.values()):
            connection = peer.connection
            if connection is not None:
                if connection.card is None and now >= connection.since + HELLO_S:
                    self._drop(peer, f"no word within {HELLO_S:g} s")
            elif peer.address is not None and now >= peer.due:
                try:
                    peer.connection = dial(peer.address, now)
                except (OSError, ValueError) as error:
                    self._drop(peer, f"cannot be connected to: {error}")
                else:
                    self._begin(peer)

    def _begin(self, peer: _Peer) -> None:
        peer.greeting = Greeting(self._card, self._key, dialed=peer.address is not None)
        self._send(peer, peer.greeting.begin())

    def _send(self, peer: _Peer, message: Message) -> None:
        connection = peer.connection
        assert connection is not None
        try:
            connection.send(message)
        except LinkClosed as error:
            self._drop(peer, str(error))
        except ValueError as error:
            _logger.error("%s is not told what it cannot take: %s", peer.name, error)

    def _exchange(self, peer: _Peer, events: int) -> None:
        connection = peer.connection
        if connection is None:
            return  # dropped since
        try:
            if events & selectors.EVENT_WRITE:
                if connection.connecting:
                    connection.connected()
                connection.flush()
            if events & selectors.EVENT_READ and not connection.connecting:
                for message in connection.receive():
                    if connection.card is None or isinstance(message, Words):
                        self._greet(peer, connection, message)
                    else:
                        self._tell(Received(peer.name, message))
                        if peer.address is None:
                            self._transport.expect()
                    if peer.connection is None:
                        return
        except OSError as error:
            self._drop(peer, f"cannot be connected to: {error}")
        except LinkClosed as error:
            self._drop(peer, str(error), mismatch=isinstance(error, Unfit))

    def _greet(self, peer: _Peer, connection: Connection, message: Message) -> None:
        assert peer.greeting is not None, "a connection without a greeting"
        if (answer := peer.greeting.hear(message)) is not None:
            self._send(peer, answer)
        if (card := peer.greeting.card) is None:
            return
        if peer.address is not None:
            try:
                self._transport.connect(card.incarnation, card.address)
            except TransportError as error:
                self._drop(peer, str(error))
                return
        else:
            for other in list(self._peers.values()):
                if other.address is None and other.card is not None and other.card.engine == card.engine:
                    self._drop(other, f"another connection of {card.engine} took its place")
            self._transport.expect()
        connection.card = card
        peer.delay, peer.told = FIRST_RETRY_S, ""
        self._tell(Connected(peer.name, card, dialed=peer.address is not None))

    def _hang_up(self, peer: _Peer) -> None:
        connection, peer.connection = peer.connection, None
        if connection is not None:
            with suppress(KeyError):
                self._selector.unregister(connection.sock)
            connection.sock.close()
            card = connection.card
            if card is not None and not any(
                other.card is not None and other.card.incarnation == card.incarnation for other in self._peers.values()
            ):
                self._transport.forget(card.incarnation)

    def _drop(self, peer: _Peer, why: str, *, mismatch: bool = False) -> None:
        self._hang_up(peer)
        if peer.address is None:
            del self._peers[peer.name]
        else:
            peer.due = self._clock() + peer.delay
            peer.delay = min(2 * peer.delay, LAST_RETRY_S)
        if why != peer.told:
            peer.told = why
            self._tell(Lost(peer.name, why, mismatch, dialed=peer.address is not None))
