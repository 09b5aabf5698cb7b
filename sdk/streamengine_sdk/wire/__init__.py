"""Every message of ``streamengine.v1``: typed values, JSON text in and out. No I/O.

A frame is one JSON object whose ``type`` names the message. The server refuses fields it does not know
(``x_…`` is free); a client ignores unknown fields and gets `Unknown` for unknown types.
Optional fields that are absent hold `msgspec.UNSET` or their default, and are not encoded.

Shapes and types are checked here, numbers where they are used: the engine knows its own limits.
``protocol.schema.json`` of this package says the same in JSON Schema.
"""

from streamengine_sdk.wire.client import (
    Ack,
    Attach,
    Cancel,
    ClientMessage,
    Delivery,
    Generate,
    Init,
    Ping,
    RequestId,
    StreamId,
    Timeouts,
    TokenId,
)
from streamengine_sdk.wire.codec import BadMessage, decode_client, decode_server, encode, field_of
from streamengine_sdk.wire.server import (
    Accepted,
    Batch,
    Call,
    Cause,
    Channel,
    Check,
    DeliveryStats,
    Delta,
    Done,
    Error,
    FinishReason,
    GoAway,
    Guided,
    Heartbeat,
    Hello,
    InterToken,
    Limits,
    Logprob,
    Phase,
    Pong,
    Progress,
    ServerMessage,
    Timing,
    Unknown,
    Usage,
    Value,
)

PROTOCOL = "streamengine.v1"

__all__ = [
    "PROTOCOL",
    "Accepted",
    "Ack",
    "Attach",
    "BadMessage",
    "Batch",
    "Call",
    "Cancel",
    "Cause",
    "Channel",
    "Check",
    "ClientMessage",
    "Delivery",
    "DeliveryStats",
    "Delta",
    "Done",
    "Error",
    "FinishReason",
    "Generate",
    "GoAway",
    "Guided",
    "Heartbeat",
    "Hello",
    "Init",
    "InterToken",
    "Limits",
    "Logprob",
    "Phase",
    "Ping",
    "Pong",
    "Progress",
    "RequestId",
    "ServerMessage",
    "StreamId",
    "Timeouts",
    "Timing",
    "TokenId",
    "Unknown",
    "Usage",
    "Value",
    "decode_client",
    "decode_server",
    "encode",
    "field_of",
]
