"""Client for streamengine: tokens over one WebSocket, on asyncio, trio or without either. Imports no torch."""

from streamengine_sdk import events
from streamengine_sdk.client import AsyncClient
from streamengine_sdk.errors import (
    ConnectError,
    ConnectionLost,
    ContextLengthExceeded,
    EngineError,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    OutputInvalid,
    Overloaded,
    ProtocolError,
    RateLimited,
    RequestError,
    StreamLost,
    Timeout,
    Unauthorized,
    UnsupportedFeature,
)
from streamengine_sdk.events import Result, ToolCall, Trace
from streamengine_sdk.request import Options
from streamengine_sdk.settings import Backoff, Timeouts
from streamengine_sdk.stream import TokenStream
from streamengine_sdk.sync import Client, SyncStream
from streamengine_sdk.transport import Endpoint, Transport, TransportClosed, WebSocketTransport

__all__ = [
    "AsyncClient",
    "Backoff",
    "Client",
    "ConnectError",
    "ConnectionLost",
    "ContextLengthExceeded",
    "Endpoint",
    "EngineError",
    "EngineFailed",
    "InvalidRequest",
    "ModelNotFound",
    "Options",
    "OutputInvalid",
    "Overloaded",
    "ProtocolError",
    "RateLimited",
    "RequestError",
    "Result",
    "StreamLost",
    "SyncStream",
    "Timeout",
    "Timeouts",
    "TokenStream",
    "ToolCall",
    "Trace",
    "Transport",
    "TransportClosed",
    "Unauthorized",
    "UnsupportedFeature",
    "WebSocketTransport",
    "events",
]
