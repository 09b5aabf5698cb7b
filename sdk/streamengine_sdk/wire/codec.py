"""JSON text in and out: which message a frame is, or what is wrong with it.

Messages are told apart by ``type``, so a good one costs one typed decode.
"""

import json
import re
from typing import Any, get_args

import msgspec
from msgspec import UNSET

from streamengine_sdk.strict_json import check_json, check_size
from streamengine_sdk.wire.client import ID_PATTERN, ClientMessage, Generate
from streamengine_sdk.wire.server import Error, ServerMessage, Unknown

_ENCODER = msgspec.json.Encoder()
_CLIENT = msgspec.json.Decoder(ClientMessage)
_SERVER = msgspec.json.Decoder(ServerMessage)
_CLIENT_KINDS: dict[str, type[ClientMessage]] = {kind.__struct_config__.tag: kind for kind in get_args(ClientMessage)}
_ID = re.compile(ID_PATTERN)
_STARTING = {"generate", "attach"}
_SERVER_TYPES = {kind.__struct_config__.tag for kind in get_args(ServerMessage)}


class BadMessage(Exception):
    """A frame that is no message. ``error`` is what a server answers; at most one of ``id`` and ``ref`` is set.

    ``id`` means that a `generate` or `attach` with a readable id was refused: the answer is its terminal.
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
    """What a client reads: lenient about what it does not know. Raises `BadMessage`.

    In a batch, messages of unknown types are left out.
    """
    try:
        return _SERVER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        fields = _parse(text)
        name, events = fields.get("type"), fields.get("events")
        if isinstance(name, str) and name not in _SERVER_TYPES:
            return Unknown(type=name, fields=fields)
        if name == "batch" and isinstance(events, list):
            fields["events"] = known = [it for it in events if not _is_unknown(it)]
            if len(known) < len(events):
                return decode_server(_ENCODER.encode(fields).decode())
        raise BadMessage("invalid_message", str(error), param=field_of(str(error))) from error


def _is_unknown(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("type"), str) and event["type"] not in _SERVER_TYPES


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
        if name in _STARTING and ref is not None and _ID.match(ref):
            raise BadMessage("invalid_request", str(error), param=param, id=ref) from error
        raise BadMessage("invalid_message", str(error), param=param, ref=ref) from error


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise BadMessage("invalid_json", str(error), ref=_id_of(text)) from error
    if not isinstance(fields, dict):
        raise BadMessage("invalid_message", f"a message is an object, not {type(fields).__name__}")
    return fields


def _id_of(text: str) -> str | None:
    """Of what only a lenient parser reads, as half a character or a number out of range: or its sender would wait for
    an answer for ever."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    id = fields.get("id") if isinstance(fields, dict) else None
    return id if isinstance(id, str) and _ID.match(id) else None


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
