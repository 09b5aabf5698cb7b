"""What a server says. Lenient: a newer server may say more than a client knows.

So where a field is one of some words it is typed as any string: a client that meets a word it does not know
hands it on. The schema, which servers are held to, lists them.
"""

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

Channel: TypeAlias = str
"""``text``, ``reasoning`` or ``tool``."""

Phase: TypeAlias = str
"""``queued``, ``prefill``, ``decode`` or ``tool``."""

FinishReason: TypeAlias = str
"""``stop``, ``length``, ``tool_calls``, ``content_filter`` or ``cancelled``."""

Cause: TypeAlias = str
"""Of a cancellation: ``client``, ``disconnect``, ``timeout``, ``shutdown`` or ``operator``."""


class _Server(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    pass


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this server bounds, and where; a limit that is absent is none.

    Per connection: ``max_message_bytes``, ``max_streams`` open at once, ``messages_per_s`` from the client with a
    burst of ``message_burst``, ``max_session_s``, and ``idle_s`` without an open stream.
    Per principal: ``max_connections`` and ``max_principal_log_bytes``. Per stream: ``max_log_bytes``,
    ``max_attachments``, and the seconds that it is kept for: at most ``max_linger_s`` without a reader,
    ``retain_s`` after its end, ``ack_stall_s`` with data waiting for an ack.
    A client hears something at least every ``heartbeat_s``.
    """

    max_message_bytes: int
    max_streams: int
    heartbeat_s: float
    max_queue: int | UnsetType = UNSET
    max_log_bytes: int | UnsetType = UNSET
    max_principal_log_bytes: int | UnsetType = UNSET
    max_connections: int | UnsetType = UNSET
    max_attachments: int | UnsetType = UNSET
    max_linger_s: float | UnsetType = UNSET
    max_session_s: float | UnsetType = UNSET
    retain_s: float | UnsetType = UNSET
    ack_stall_s: float | UnsetType = UNSET
    idle_s: float | UnsetType = UNSET
    messages_per_s: float | UnsetType = UNSET
    message_burst: int | UnsetType = UNSET


class Hello(_Server, frozen=True, tag="hello"):
    """First message. A changed ``epoch`` means that the server restarted and earlier streams are gone.

    ``auth`` is ``ok``, ``none`` (nothing is asked) or ``required`` (an `Init` with a token must be next).
    """

    protocol: str
    epoch: str
    auth: str
    limits: Limits
    session: str | UnsetType = UNSET
    server: dict[str, str] | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    features: list[str] | UnsetType = UNSET


class Accepted(_Server, frozen=True, tag="accepted"):
    """The answer to `Generate` and `Attach`: tokens after ``after`` follow.

    ``replay`` is set where the `Generate` repeated a key and so started nothing. ``seed`` is what the tokens are drawn
    with, asked for or not: another server needs it to continue the answer.
    """

    id: str
    stream: str
    after: int
    model: str | UnsetType = UNSET
    created: float | UnsetType = UNSET
    replay: bool | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class Progress(_Server, frozen=True, tag="progress"):
    id: str
    phase: Phase
    queue_position: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    prefilled_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET


class Logprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token's log-probability. What it writes is ``text``, or ``b64`` where that is a part of a character.

    ``top`` are the likeliest tokens in its place, best first.
    """

    token: int
    logprob: float
    text: str | UnsetType = UNSET
    b64: str | UnsetType = UNSET
    top: list["Logprob"] | UnsetType = UNSET


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tool call a delta of channel ``tool`` belongs to; its first one brings ``id`` and ``name``."""

    index: int
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class Delta(_Server, frozen=True, tag="delta"):
    """A slice of the stream: ``n`` tokens ending at ``seq``, whole code points only. ``logprobs``, if asked for,
    are one for each token. ``pad`` is noise that hides the length of the text."""

    id: str
    seq: int
    text: str
    n: int = 1
    channel: Channel = "text"
    call: Call | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    pad: str | UnsetType = UNSET


class Value(_Server, frozen=True, tag="value"):
    """Of an answer that is JSON: the value at ``path`` (a JSON Pointer) is complete since token ``seq``."""

    id: str
    seq: int
    path: str
    value: Any


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. ``cached_tokens`` are those of the prompt that were known, ``reasoning_tokens`` those of the
    completion that are no answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class InterToken(msgspec.Struct, frozen=True):
    """Milliseconds between tokens: median, 99th percentile, longest."""

    p50: float
    p99: float
    max: float


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds on the server's monotonic clock; absent (None) where it did not come to that.

    ``forced_tokens`` of the answer took no time to choose: its grammar left no choice. ``continued_tokens`` of it came
    with the request, and the times are those of the rest. ``remote_prefill`` is ``done`` where another engine than the
    one that answers computed the prompt, or why one that was to compute it did not.
    """

    total_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    decode_ms: float | None = None
    tokens_per_s: float | None = None
    itl_ms: InterToken | None = None
    forced_tokens: int = 0
    continued_tokens: int = 0
    remote_prefill: str | None = None


class Guided(msgspec.Struct, frozen=True, kw_only=True):
    """Of an answer to a schema that was not ``strict``: what of the schema was not enforced, and whether the answer
    keeps to it all the same; None where that cannot be told."""

    valid: bool | None
    warnings: list[str]


class Check(msgspec.Struct, frozen=True):
    """Length in bytes and CRC-32 of the whole text in UTF-8, all channels in order."""

    bytes: int
    crc32: int


class DeliveryStats(msgspec.Struct, frozen=True, kw_only=True):
    """How the stream came to this reader: deltas sent, most tokens that waited at once, attachments so far."""

    frames: int
    max_lag: int
    attaches: int


class Done(_Server, frozen=True, tag="done"):
    """The one good terminal of a request; ``seq`` is the last token's plus one."""

    id: str
    seq: int
    finish_reason: FinishReason
    usage: Usage
    check: Check
    stream: str | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    cause: Cause | UnsetType = UNSET
    stop_sequence: str | UnsetType = UNSET
    guided: Guided | UnsetType = UNSET
    delivery: DeliveryStats | UnsetType = UNSET


class Error(_Server, frozen=True, tag="error"):
    """With ``id``: the terminal of that request. With ``ref``: about one message, no request is harmed.
    With neither and ``fatal``: the socket closes next.

    ``available_from`` comes with ``resume_gap``: an `Attach` after that token would succeed.
    ``prompt_tokens`` and ``limit`` come with ``context_length_exceeded``.
    """

    code: str
    message: str
    status: int
    retryable: bool
    retry_after_ms: int | UnsetType = UNSET
    param: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    ref: str | UnsetType = UNSET
    stream: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    available_from: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    fatal: bool | UnsetType = UNSET


class GoAway(_Server, frozen=True, tag="goaway"):
    """No new ``generate`` on this connection; running ones go on until the deadline.

    ``reason`` is ``shutdown``, ``max_session``, ``idle`` or ``rebalance``.
    """

    reason: str
    deadline_ms: int
    reconnect: bool


class Heartbeat(_Server, frozen=True, tag="heartbeat"):
    t: float | UnsetType = UNSET


class Pong(_Server, frozen=True, tag="pong"):
    t: float
    server_t: float | UnsetType = UNSET


class Unknown(msgspec.Struct, frozen=True):
    """A server message of a type that this client does not know; to be ignored."""

    type: str
    fields: dict[str, Any]


Single = Hello | Accepted | Progress | Delta | Value | Done | Error | GoAway | Heartbeat | Pong


class Batch(_Server, frozen=True, tag="batch"):
    """Several messages in one frame, in order. Only for a client whose `Init` said so."""

    events: list[Single]


ServerMessage = Single | Batch
