"""What a client is told: the one place that sends.

Answers to single messages wait here, bounded; tokens never do. With ``batch`` small messages gather into one frame.
"""

import secrets
from collections import deque

from streamengine.bell import Bell
from streamengine.session.transport import Transport
from streamengine_sdk import wire

MAX_REPLIES = 256
"""None is longer than about a kilobyte: see `shorten`."""

FRAME_BYTES = 16 * 1024
"""A batch grows no further than this."""


class Outbound:
    """The server's side of one transport; ``bell`` is rung when there is an answer to send."""

    def __init__(self, transport: Transport, bell: Bell) -> None:
        self.batch = False
        """The client takes several messages in one frame."""
        self.frames = 0
        """How many were sent."""
        self._transport = transport
        self._bell = bell
        self._room = Bell()
        self._replies: deque[wire.ServerMessage] = deque()
        self._gathered: list[str] = []
        self._size = 0

    @property
    def idle(self) -> bool:
        return not self._replies

    def reply(self, message: wire.ServerMessage) -> None:
        self._replies.append(message)
        self._bell.set()

    async def room(self) -> None:
        """Until there is room for another answer: who asks on while nothing is read waits here."""
        while len(self._replies) >= MAX_REPLIES:
            self._room.rearm()
            await self._room.wait()

    async def writable(self) -> None:
        """Until the transport takes more, and what was answered meanwhile has left."""
        if not self._gathered:
            await self._transport.writable()
        await self.send_replies()

    async def send_replies(self) -> None:
        while self._replies:
            await self.send(self._replies.popleft())
            self._room.set()

    async def send(self, message: wire.ServerMessage, pad: int = 0) -> None:
        """Now, or with ``batch`` when `flush` says so. Its frame is a multiple of ``pad`` bytes long."""
        text = wire.encode(message)
        if pad:
            text = _padded(text, pad)
        if not self.batch:
            await self._give(text)
            return
        if self._size + len(text) > FRAME_BYTES:
            await self.flush()
        self._gathered.append(text)
        self._size += len(text)

    async def flush(self) -> None:
        """Send what was gathered."""
        if gathered := self._gathered:
            self._gathered, self._size = [], 0
            await self._give(gathered[0] if len(gathered) == 1 else _batch(gathered))

    async def _give(self, text: str) -> None:
        await self._transport.send_text(text)
        self.frames += 1


def _batch(texts: list[str]) -> str:
    """A `wire.Batch` of messages that are encoded already."""
    return f'{{"type":"batch","events":[{",".join(texts)}]}}'


def _padded(text: str, multiple: int) -> str:
    """An encoded message with a field that makes its length in bytes a ``multiple``, and cannot be guessed."""
    missing = -(len(text.encode()) + len(',"pad":""')) % multiple
    return f'{text[:-1]},"pad":"{secrets.token_urlsafe(missing)[:missing]}"}}'
