"""One connection: wire messages ↔ engine calls, over a transport of four methods."""

from streamengine.session.connection import Session, Transport, TransportClosed

__all__ = ["Session", "Transport", "TransportClosed"]
