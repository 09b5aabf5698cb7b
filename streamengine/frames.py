"""Length-prefixed msgpack: how messages travel over a socket. A frame is a list of messages of one direction, in order.

Never pickle: what comes is decoded into the frozen values that are expected, or refused.
"""

import struct
from typing import Generic, TypeVar

import msgspec

_PREFIX = struct.Struct("!I")

Message = TypeVar("Message")


class LinkClosed(Exception):
    """The other end is gone, or this one was closed."""


class LinkBroken(LinkClosed):
    """What came is no message: the two ends do not mean the same, or the stream is out of step."""


class Frames(Generic[Message]):
    """Bytes in, whole messages out.

    Args:
        messages: the type of a frame, a list.
        limit: bytes of one frame; a longer one is refused before it was read.
        first: bytes of the first frame, by whoever that may be from; as many as of any other by default.
    """

    def __init__(self, messages: object, limit: int, first: int | None = None) -> None:
        self._limit = limit if first is None else first
        self._later = limit
        self._bytes = bytearray()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def feed(self, data: bytes) -> list[Message]:
        """All messages that ``data`` completes. No data is the stream's end.

        Raises:
            LinkClosed: at the end of the stream; `LinkBroken` where it makes no sense.
        """
        if not data:
            raise LinkClosed("closed in the middle of a frame" if self._bytes else "closed by the other end")
        self._bytes += data
        messages: list[Message] = []
        begin = 0
        while len(self._bytes) - begin >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(self._bytes, begin)
            if length > self._limit:
                raise LinkBroken(f"a frame of {length} bytes: the stream is out of step")
            end = begin + _PREFIX.size + length
            if len(self._bytes) < end:
                break
            try:
                messages += self._decoder.decode(bytes(self._bytes[begin + _PREFIX.size : end]))
            except msgspec.MsgspecError as error:
                raise LinkBroken(f"a frame that cannot be decoded: {error}") from error
            begin, self._limit = end, self._later
        del self._bytes[:begin]
        return messages


def pack(messages: list[msgspec.Raw]) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(messages)
    return _PREFIX.pack(len(body)) + body


def encode(message: object, limit: int) -> msgspec.Raw:
    """For `pack`. Raises `TypeError`, `ValueError` or `OverflowError` for what cannot travel."""
    body = msgspec.msgpack.encode(message)
    if len(body) > limit - 8:  # the list around it
        raise ValueError(f"a message of {len(body)} bytes")
    return msgspec.Raw(body)
