"""Every message of ``streamengine.v1``: typed values, JSON text in and out. No I/O.

A frame is one JSON object whose ``type`` names the message. The server refuses fields it does not know
(``x_…`` is free); a client ignores unknown fields and gets `Unknown` for unknown types.
Optional fields that are absent hold `msgspec.UNSET` or their default, and are not encoded.

Shapes and types are checked here, numbers where they are used: the engine knows its own limits.
``protocol.schema.json`` beside this file says the same in JSON Schema.
"""

import re
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streamengine_sdk.strict_json import check_json, check_size

PROTOCOL = "streamengine.v1"

_ID = r"^[A-Za-z0-9_.:-]{1,64}\Z"  # `$` would let a line feed pass at the end
RequestId = Annotated[str, Meta(pattern=_ID)]
TokenId = Annotated[int, Meta(ge=0)]
Channel = Literal["text", "reasoning", "tool"]
Phase = Literal["queued", "prefill", "decode", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled"]
Cause = Literal["client", "disconnect", "timeout", "shutdown", "operator"]


class _Client(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", forbid_unknown_fields=True
):
    """Strict: a misspelt field is an error."""


class _Server(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Lenient: a newer server may say more than this client knows."""


# client → server


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Server-side deadlines of one request, in seconds."""

    queue_s: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    total_s: Annotated[float, Meta(gt=0)] | UnsetType = UNSET


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a stream is shown to one reader; never changes what is generated."""

    coalesce_ms: Annotated[float, Meta(ge=0, le=1000)] = 0
    coalesce_tokens: Annotated[int, Meta(ge=1, le=1024)] = 1
    window: Annotated[int, Meta(ge=0, le=65536)] = 0
    on_disconnect: Literal["linger", "cancel"] | UnsetType = UNSET
    linger_s: Annotated[float, Meta(ge=0, le=600)] | UnsetType = UNSET
    token_ids: bool = False
    values: bool = False
    pad: Annotated[int, Meta(ge=0, le=256)] = 0


class Generate(_Client, frozen=True, tag="generate"):
    """Start a stream. Exactly one of ``messages``, ``prompt`` (plain text, no template) and ``token_ids``."""

    id: RequestId
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    token_ids: Annotated[list[TokenId], Meta(min_length=1)] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    key: Annotated[str, Meta(min_length=8, max_length=128)] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    min_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    typical_p: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop: list[str] | UnsetType = UNSET
    stop_token_ids: list[TokenId] | UnsetType = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    bad_words: list[str | list[TokenId]] | UnsetType = UNSET
    allowed_token_ids: list[TokenId] | UnsetType = UNSET
    logprobs: bool | UnsetType = UNSET
    top_logprobs: int | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType = UNSET
    response_format: dict[str, Any] | UnsetType = UNSET
    tools: list[Any] | UnsetType = UNSET
    tool_choice: Any = UNSET
    priority: int | UnsetType = UNSET
    timeouts: Timeouts | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    delivery: Delivery = Delivery()


class Cancel(_Client, frozen=True, tag="cancel"):
    """Stop a request. Unknown or finished ids are ignored: races are normal."""

    id: RequestId
    reason: Annotated[str, Meta(max_length=200)] | UnsetType = UNSET


class Ping(_Client, frozen=True, tag="ping"):
    t: float = 0


ClientMessage = Generate | Cancel | Ping

# server → client


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    max_message_bytes: int
    max_streams: int
    heartbeat_s: float
    max_queue: int | UnsetType = UNSET


class Hello(_Server, frozen=True, tag="hello"):
    """First message. A changed ``epoch`` means that the server restarted and earlier streams are gone."""

    protocol: str
    epoch: str
    auth: Literal["ok", "required", "none"]
    limits: Limits
    session: str | UnsetType = UNSET
    server: dict[str, str] | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    features: list[str] | UnsetType = UNSET


class Accepted(_Server, frozen=True, tag="accepted"):
    id: str
    stream: str
    after: int
    model: str | UnsetType = UNSET
    created: float | UnsetType = UNSET
    replay: bool | UnsetType = UNSET


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


class Delta(_Server, frozen=True, tag="delta"):
    """A slice of the stream: ``n`` tokens ending at ``seq``, whole code points only. ``logprobs``, if asked for,
    are one for each token."""

    id: str
    seq: int
    text: str
    n: int = 1
    channel: Channel = "text"
    tokens: list[int] | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class InterToken(msgspec.Struct, frozen=True):
    """Milliseconds between tokens: median, 99th percentile, longest."""

    p50: float
    p99: float
    max: float


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds on the server's monotonic clock; absent (None) where it did not come to that."""

    total_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    decode_ms: float | None = None
    tokens_per_s: float | None = None
    itl_ms: InterToken | None = None


class Check(msgspec.Struct, frozen=True):
    """Length in bytes and CRC-32 of the whole text in UTF-8."""

    bytes: int
    crc32: int


class Done(_Server, frozen=True, tag="done"):
    """The one good terminal of a request; ``seq`` is the last token's plus one."""

    id: str
    seq: int
    finish_reason: FinishReason
    usage: Usage
    check: Check
    timing: Timing | UnsetType = UNSET
    cause: Cause | UnsetType = UNSET
    stop_sequence: str | UnsetType = UNSET


class Error(_Server, frozen=True, tag="error"):
    """With ``id``: the terminal of that request. With ``ref``: about one message, no request is harmed.
    With neither and ``fatal``: the socket closes next."""

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
    fatal: bool | UnsetType = UNSET


class GoAway(_Server, frozen=True, tag="goaway"):
    """No new ``generate`` on this server; running ones go on until the deadline."""

    reason: Literal["shutdown", "max_session", "idle", "rebalance"]
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


ServerMessage = Hello | Accepted | Progress | Delta | Done | Error | GoAway | Heartbeat | Pong

# JSON text in and out

_ENCODER = msgspec.json.Encoder()
_CLIENT = msgspec.json.Decoder(ClientMessage)
_SERVER = msgspec.json.Decoder(ServerMessage)
_CLIENT_KINDS: dict[str, type[ClientMessage]] = {kind.__struct_config__.tag: kind for kind in get_args(ClientMessage)}
_SERVER_TYPES = {kind.__struct_config__.tag for kind in get_args(ServerMessage)}


class BadMessage(Exception):
    """A frame that is no message. ``error`` is what a server answers; at most one of ``id`` and ``ref`` is set.

    ``id`` means that a `generate` with a readable id was refused, so the answer is that request's terminal.
    (A server checks first that no open request has this id.) ``ref`` is whatever id the frame had otherwise.
    """

    def __init__(
        self, code: str, message: str, *, param: str | None = None, id: str | None = None, ref: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        # Both may quote the frame, and an answer must not be as long as what it answers.
        self.message = message[:300]
        self.param = param[:100] if param else None
        self.id = id
        self.ref = ref

    @property
    def error(self) -> Error:
        named = {"param": self.param, "id": self.id, "ref": self.ref}
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        return Error(code=self.code, message=self.message, status=400, retryable=False, **given)


def encode(message: ClientMessage | ServerMessage) -> str:
    """One frame. Raises `ValueError` or `TypeError` for what JSON cannot hold, as a lone surrogate."""
    return _ENCODER.encode(message).decode()


def decode_server(text: str) -> ServerMessage | Unknown:
    """What a client reads: lenient about what it does not know. Raises `BadMessage`."""
    try:
        return _SERVER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        fields = _parse(text)
        name = fields.get("type")
        if isinstance(name, str) and name not in _SERVER_TYPES:
            return Unknown(type=name, fields=fields)
        raise BadMessage("invalid_message", str(error), param=field_of(str(error))) from error


def decode_client(text: str | bytes) -> ClientMessage:
    """What a server reads: strict. Raises `BadMessage`.

    A good message costs a typed decode and a look for duplicate keys and depth, some microseconds in all;
    finding out what is wrong, or dropping ``x_…`` fields, costs a second decode.
    """
    if isinstance(text, bytes):
        raise BadMessage("invalid_message", "a binary frame is no message")
    try:
        check_size(text)
    except ValueError as error:
        raise BadMessage("invalid_json", str(error)) from error
    try:
        message = _CLIENT.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        message = _decode_slowly(text)
    try:
        check_json(text)
    except ValueError as error:
        raise BadMessage("invalid_json", str(error), ref=getattr(message, "id", None)) from error
    if isinstance(message, Generate):
        _check_source(message)
    return message


def _decode_slowly(text: str) -> ClientMessage:
    """Say what is wrong, field by field; or decode a message whose only fault are ``x_…`` fields."""
    fields = _parse(text)
    name, id = fields.get("type"), fields.get("id")
    ref = id if isinstance(id, str) and len(id) <= 64 else None
    if not isinstance(name, str):
        raise BadMessage("invalid_message", "type must be given and be a string", param="type", ref=ref)
    if name not in _CLIENT_KINDS:
        known = ", ".join(_CLIENT_KINDS)
        raise BadMessage("unknown_type", f"type {name[:64]!r} is none of {known}", param="type", ref=ref)
    fields = {key: value for key, value in fields.items() if not key.startswith("x_")}
    try:
        return msgspec.convert(fields, _CLIENT_KINDS[name])
    except msgspec.ValidationError as error:
        param = field_of(str(error))
        if name == "generate" and ref is not None and re.match(_ID, ref):
            raise BadMessage("invalid_request", str(error), param=param, id=ref) from error
        raise BadMessage("invalid_message", str(error), param=param, ref=ref) from error


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise BadMessage("invalid_json", str(error)) from error
    if not isinstance(fields, dict):
        raise BadMessage("invalid_message", f"a message is an object, not {type(fields).__name__}")
    return fields


def _check_source(message: Generate) -> None:
    sources = {"prompt": message.prompt, "messages": message.messages, "token_ids": message.token_ids}
    given = [name for name, value in sources.items() if value is not UNSET]
    if len(given) != 1:
        text = f"give exactly one of prompt, messages and token_ids, not {' and '.join(given) or 'none'}"
        raise BadMessage("invalid_request", text, param=given[-1] if given else "prompt", id=message.id)


_FIELD = re.compile(r"`\$\.?([^`]*)`\Z")
_NAMED = re.compile(r"(?:required|unknown) field `([^`]*)`")


def field_of(message: str) -> str | None:
    """The field that msgspec complains about: "… - at `$.delivery.pad`" is "delivery.pad"."""
    place, named = _FIELD.search(message), _NAMED.search(message)
    parts = [place.group(1) if place else "", named.group(1) if named else ""]
    return ".".join(filter(None, parts)).replace("[...]", "") or None
