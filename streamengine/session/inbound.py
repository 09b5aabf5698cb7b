"""What a client says: frames into messages, no faster than the limits allow.

A long message is decoded in a worker thread, and the next one is read after it: messages keep their order.
"""

from math import ceil

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from streamengine.session.transport import Transport
from streamengine_sdk import wire

INLINE_BYTES = 64 * 1024
"""A longer message may take more than a millisecond to decode."""

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("decoders")


class Inbound:
    """The client's side of one transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def next(self) -> wire.ClientMessage | wire.BadMessage:
        """The next message. Keeps nothing of a frame while the next one is waited for. Raises `TransportClosed`."""
        frame = await self._transport.receive()
        try:
            if len(frame) <= INLINE_BYTES:
                return wire.decode_client(frame)
            return await anyio.to_thread.run_sync(wire.decode_client, frame, limiter=_decoders())
        except wire.BadMessage as bad:
            return bad


class Bucket:
    """Lets ``rate`` things a second pass on average and ``burst`` at once. Time comes in as an argument.

    Whoever goes on after a refusal runs into debt; at another ``burst`` of that it is a `flood`.
    """

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = float(burst)
        self._at = now

    @property
    def flood(self) -> bool:
        return self._level < -self._burst

    def take(self, now: float) -> int | None:
        """None if this one passes, otherwise in how many milliseconds one may."""
        self._level = min(self._level + (now - self._at) * self._rate, self._burst) - 1
        self._at = now
        return None if self._level >= 0 else ceil(-self._level / self._rate * 1000)


def _decoders() -> anyio.CapacityLimiter:
    """Two threads for all connections of an event loop: more would only take turns with it."""
    try:
        return _limiter.get()
    except LookupError:
        _limiter.set(limiter := anyio.CapacityLimiter(2))
        return limiter
