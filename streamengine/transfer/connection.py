"""One control connection, over a unix or TCP socket that never blocks: frames in, frames out, both bounded."""

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from streamengine.frames import Frames, LinkBroken, LinkClosed, encode, pack
from streamengine.transfer.values import Card, Message

MAX_HELLO_BYTES = 2**20
"""Of the first frame, by whomever."""

MAX_FRAME_BYTES = 16 * 2**20
"""A prompt of a million tokens is 5 MB."""

MAX_OUTBOX_BYTES = 64 * 2**20
"""A peer that leaves more unread is dropped."""

SILENCE_S = 10
"""A TCP peer that acknowledges nothing for so long is gone."""

_CHUNK_BYTES = 256 * 1024
_Where = tuple[socket.AddressFamily, str | tuple[str, int]]


class Connection:
    """Owns ``sock``. ``card`` is the other side's, from its `Hello` on."""

    def __init__(self, sock: socket.socket, since: float, *, connecting: bool = False) -> None:
        self.sock = sock
        self.since = since
        self.connecting = connecting
        self.card: Card | None = None
        self._frames: Frames[Message] = Frames(list[Message], MAX_FRAME_BYTES, MAX_HELLO_BYTES)
        self._outbox = bytearray()

    def connected(self) -> None:
        """It was `connecting`, and can be written. Raises OSError where it is not connected after all."""
        if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        self.connecting = False

    def receive(self) -> list[Message]:
        """What is there, possibly nothing.

        Raises:
            LinkClosed: the connection is over, or what came makes no sense.
        """
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise LinkClosed(_said(error)) from error
        return self._frames.feed(data)

    def send(self, message: Message) -> None:
        """Write now what can be, and the rest when `flush` is called.

        Raises:
            LinkClosed: the connection is over, or the other side does not read.
            ValueError: the message is too large for anybody to take.
        """
        self._outbox += pack([encode(message, MAX_FRAME_BYTES)])
        if len(self._outbox) > MAX_OUTBOX_BYTES:
            raise LinkBroken(f"{len(self._outbox)} bytes wait to be read by the other end")
        self.flush()

    def flush(self) -> None:
        """Raises LinkClosed."""
        if self.connecting or not self._outbox:
            return
        try:
            sent = self.sock.send(self._outbox)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise LinkClosed(_said(error)) from error
        del self._outbox[:sent]

    @property
    def wants_to_write(self) -> bool:
        return self.connecting or bool(self._outbox)


def dial(address: str, now: float) -> Connection:
    """A connection that may still be `connecting`. Raises OSError."""
    family, where = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _prepare(sock)
        code = sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return Connection(sock, now, connecting=code != 0)


def accept(listener: socket.socket, now: float) -> Connection | None:
    """None where nobody is there any more, or there is no descriptor left."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    _prepare(sock)
    return Connection(sock, now)


def listen(address: str) -> socket.socket:
    """Raises OSError, ValueError. A unix socket is this user's alone; a file that a dead one left is replaced."""
    try:
        return _listen(address)
    except OSError as error:
        raise type(error)(error.errno, f"{address} cannot be listened on: {_said(error)}") from error


def unlisten(listener: socket.socket) -> None:
    """Close it, and leave no file behind. Twice is once."""
    where = listener.getsockname() if listener.fileno() >= 0 else None
    listener.close()
    if isinstance(where, str):
        with suppress(OSError):
            os.unlink(where)


def _listen(address: str) -> socket.socket:
    family, where = _parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(where, str):
            _clear(where)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        if isinstance(where, str):
            os.chmod(where, 0o600)
        sock.listen()
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _clear(path: str) -> None:
    """Remove a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # bind will say so
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink(missing_ok=True)


def _parse(address: str) -> _Where:
    """``unix:PATH`` or ``HOST:PORT``, resolved. Raises ValueError, OSError."""
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"{address!r} is neither unix:PATH nor HOST:PORT")
    family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, where[:2]  # type: ignore[return-value]


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of a peer whose machine or link is gone nothing ever comes, not even a word that it is gone.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, SILENCE_S // 5))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _said(error: OSError) -> str:
    return error.strerror or str(error)
