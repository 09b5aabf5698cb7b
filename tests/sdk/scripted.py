"""A server in memory that a test plays by hand: it reads what the client sent and says what comes back."""

import zlib
from collections import deque
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from streamengine_sdk import Endpoint, TransportClosed, wire

PATIENCE_S = 5.0
"""No wait of a test is longer: what does not come by then does not come."""


class Mailbox:
    """Put without waiting, get in order."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._new = anyio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._new.set()
        self._new = anyio.Event()

    def __len__(self) -> int:
        return len(self._items)

    async def get(self) -> Any:
        while not self._items:
            await self._new.wait()
        return self._items.popleft()


class Answer:
    """The server's side of one request, counting tokens and bytes as a server does."""

    def __init__(self, peer: "Peer", request: wire.Generate) -> None:
        self.request = request
        self.id = request.id
        self.seq = 0
        self._peer = peer
        self._data = b""

    def move(self, peer: "Peer") -> None:
        """The stream goes on on another connection."""
        self._peer = peer

    def accept(self) -> "Answer":
        self._peer.say(wire.Accepted(id=self.id, stream=f"st_{self.id:0>22}", after=0))
        return self

    def progress(self, **fields: Any) -> None:
        self._peer.say(wire.Progress(id=self.id, **fields))

    def delta(self, text: str, n: int = 1, *, skip: int = 0, tokens: list[int] | None = None, **fields: Any) -> None:
        self.seq += n + skip
        self._data += text.encode()
        ids = msgspec.UNSET if tokens is None else tokens
        self._peer.say(wire.Delta(id=self.id, seq=self.seq, n=n, text=text, tokens=ids, **fields))

    def done(self, finish_reason: wire.FinishReason = "stop", **fields: Any) -> None:
        honest = wire.Done(
            id=self.id,
            seq=self.seq + 1,
            finish_reason=finish_reason,
            usage=wire.Usage(prompt_tokens=3, completion_tokens=self.seq, total_tokens=3 + self.seq),
            check=wire.Check(bytes=len(self._data), crc32=zlib.crc32(self._data)),
        )
        self._peer.say(msgspec.structs.replace(honest, **fields))

    def error(self, code: str, status: int = 500, **fields: Any) -> None:
        plain = wire.Error(id=self.id, code=code, status=status, retryable=False, message=f"it is {code}")
        self._peer.say(msgspec.structs.replace(plain, **fields))


class Peer:
    """The server's end of one connection."""

    def __init__(self) -> None:
        self.sent = Mailbox()
        self.received = Mailbox()
        self.init: wire.Init | None = None
        self.closed = False

    def say(self, message: wire.ServerMessage | dict[str, Any] | str) -> None:
        if isinstance(message, dict):
            message = msgspec.json.encode(message).decode()
        self.sent.put(message if isinstance(message, str) else wire.encode(message))

    def drop(self, code: int = 1006, reason: str = "") -> None:
        self.sent.put(TransportClosed(code, reason))

    async def heard(self) -> wire.ClientMessage:
        """The next message of the client after `init`, read as strictly as a server reads."""
        with anyio.fail_after(PATIENCE_S):
            message = wire.decode_client(await self.received.get())
        if isinstance(message, wire.Init):
            assert self.init is None
            self.init = message
            return await self.heard()
        return message

    async def request(self) -> Answer:
        message = await self.heard()
        assert isinstance(message, wire.Generate)
        return Answer(self, message)


class MemoryTransport:
    """What the client holds; ``connect`` waits as long as the server says."""

    def __init__(self, server: "ScriptedServer") -> None:
        self._server = server
        self._peer = Peer()

    async def connect(self) -> None:
        await self._server.connectable.wait()
        if self._server.refusals:
            raise self._server.refusals.pop(0)
        if self._server.refusal is not None:
            raise self._server.refusal
        if self._server.hello is not None:
            self._peer.say(self._server.hello)
        self._server.peers.put(self._peer)
        self._server.connected.append(self._peer)

    async def send(self, text: str) -> None:
        await anyio.lowlevel.checkpoint()
        self._peer.received.put(text)

    async def receive(self) -> str:
        item = await self._peer.sent.get()
        if isinstance(item, TransportClosed):
            raise item
        return item

    async def close(self) -> None:
        self._peer.closed = True


class ScriptedServer:
    """Give ``transport=server`` to a client; `peer` is its next connection."""

    def __init__(
        self, *, heartbeat_s: float = 15, max_message_bytes: int = 4 * 1024 * 1024, max_streams: int = 64
    ) -> None:
        self._limits = wire.Limits(
            max_message_bytes=max_message_bytes, max_streams=max_streams, heartbeat_s=heartbeat_s
        )
        self.hello: wire.Hello | None = None
        self.set_epoch("e1")
        self.refusal: Exception | None = None
        self.refusals: list[Exception] = []
        self.connected: list[Peer] = []
        self.connectable = anyio.Event()
        self.connectable.set()
        self.endpoints: list[Endpoint] = []
        self.peers = Mailbox()

    def __call__(self, endpoint: Endpoint) -> MemoryTransport:
        self.endpoints.append(endpoint)
        return MemoryTransport(self)

    def set_epoch(self, epoch: str, auth: str = "none") -> None:
        self.hello = wire.Hello(protocol=wire.PROTOCOL, epoch=epoch, auth=auth, limits=self._limits)

    def drop_all(self) -> None:
        for peer in self.connected:
            peer.drop()

    async def peer(self) -> Peer:
        with anyio.fail_after(PATIENCE_S):
            return await self.peers.get()
