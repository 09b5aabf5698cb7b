"""One connection: wire messages ↔ streams, over a transport of four methods."""

from streamengine.session.connection import Session
from streamengine.session.transport import Transport, TransportClosed

__all__ = ["Session", "Transport", "TransportClosed"]
