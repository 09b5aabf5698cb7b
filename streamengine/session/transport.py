"""What a session needs of a connection."""

from typing import Protocol


class TransportClosed(Exception):
    """The connection is over; ``code`` is the WebSocket close code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with code {code}")
        self.code = code


class Transport(Protocol):
    """Messages in and out. Every method may raise `TransportClosed`."""

    async def send_text(self, text: str) -> None: ...

    async def receive(self) -> str | bytes:
        """The next message: a string, or the bytes of a binary one."""
        ...

    async def close(self, code: int, reason: str) -> None: ...

    async def writable(self) -> None:
        """Wait until what was sent has left, up to a small buffer."""
        ...
