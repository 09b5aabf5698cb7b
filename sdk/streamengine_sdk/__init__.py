"""Async client for streamengine: tokens over one WebSocket, on asyncio and trio. Imports no torch."""

from streamengine_sdk import events
from streamengine_sdk.client import AsyncClient, Options
from streamengine_sdk.errors import (
    ConnectError,
    ConnectionLost,
    ContextLengthExceeded,
    EngineError,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    RateLimited,
    RequestError,
    Timeout,
    Unauthorized,
    UnsupportedFeature,
)
from streamengine_sdk.events import Result
from streamengine_sdk.stream import Timeouts, TokenStream
from streamengine_sdk.transport import Endpoint, Transport, TransportClosed, WebSocketTransport

__all__ = [
    "AsyncClient",
    "ConnectError",
    "ConnectionLost",
    "ContextLengthExceeded",
    "Endpoint",
    "EngineError",
    "EngineFailed",
    "InvalidRequest",
    "ModelNotFound",
    "Options",
    "Overloaded",
    "ProtocolError",
    "RateLimited",
    "RequestError",
    "Result",
    "Timeout",
    "Timeouts",
    "TokenStream",
    "Transport",
    "TransportClosed",
    "Unauthorized",
    "UnsupportedFeature",
    "WebSocketTransport",
    "events",
]
