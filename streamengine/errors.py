"""Every error that a user can meet: its code on the wire, its HTTP status, whether to try again.

StreamEngineError
├── RequestError                 one request is at fault; others are untouched
│   ├── InvalidRequest           a field is missing, unknown, of the wrong type or out of range
│   ├── ContextLengthExceeded    prompt + answer do not fit the model or the KV cache
│   ├── InvalidJSON              a body or message that is no JSON, or one that two parsers read differently
│   ├── MessageTooLarge
│   ├── UnsupportedFeature       known to the protocol, not there in this engine
│   ├── GrammarError             a schema, pattern or grammar that is broken or cannot be enforced
│   ├── ModelNotFound
│   ├── Conflict                 somebody else is at it, and it is done once at a time
│   ├── Unauthorized             no key, or none that is known
│   ├── Forbidden                the key is known and may not do this
│   ├── StreamNotFound           never there, forgotten, or somebody else's: it is not told apart
│   └── ResumeGap                a part of the stream is no longer kept
├── Unavailable                  not now; try again
│   ├── Overloaded               the queue is full
│   ├── QueueTimeout             waited too long
│   ├── ShuttingDown
│   ├── TooManyStreams           of one connection or of one key
│   ├── RateLimited              too many messages, connections or bytes of one key
│   └── SlowConsumer             a reader that holds too much back; the stream is there and can be attached to
├── EngineFailure                the core died or a step raised
└── StartupError                 config, model or port: the engine never became ready
"""

from typing import ClassVar

MAX_MESSAGE = 300


def shorten(text: str, most: int = MAX_MESSAGE) -> str:
    """``text`` without its middle, where it is too long: an error may quote what a client sent, and a message is
    not to be as long as that."""
    return text if len(text) <= most else f"{text[: most - 93]} … {text[-90:]}"


class StreamEngineError(Exception):
    """Base of all. ``message`` is short; ``param`` names the field at fault; ``details`` holds the numbers."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, **details: int | float | str) -> None:
        self.message = shorten(message)
        super().__init__(self.message)
        self.param = None if param is None else param[:100]
        self.details = details


class RequestError(StreamEngineError):
    code = "invalid_request"
    status = 400


class InvalidRequest(RequestError):
    """``param`` is always given."""


class InvalidJSON(RequestError):
    code = "invalid_json"


class MessageTooLarge(RequestError):
    code = "message_too_large"
    status = 413


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class UnsupportedFeature(RequestError):
    code = "unsupported_feature"
    status = 422


class GrammarError(RequestError):
    code = "grammar_error"

    def __init__(self, message: str, *, param: str | None = None, **details: int | float | str) -> None:
        super().__init__(message, param=param or "response_format", **details)


class ModelNotFound(RequestError):
    code = "model_not_found"
    status = 404


class Conflict(RequestError):
    code = "conflict"
    status = 409


class Unauthorized(RequestError):
    code = "unauthorized"
    status = 401


class Forbidden(RequestError):
    code = "forbidden"
    status = 403


class StreamNotFound(RequestError):
    code = "stream_not_found"
    status = 404


class ResumeGap(RequestError):
    """``details["available_from"]`` is the least position that can be attached after."""

    code = "resume_gap"
    status = 410


class Unavailable(StreamEngineError):
    code = "overloaded"
    status = 503
    retryable = True


class Overloaded(Unavailable):
    pass


class QueueTimeout(Unavailable):
    code = "queue_timeout"


class ShuttingDown(Unavailable):
    code = "shutting_down"


class TooManyStreams(Unavailable):
    code = "too_many_streams"
    status = 429


class RateLimited(Unavailable):
    code = "rate_limited"
    status = 429


class SlowConsumer(Unavailable):
    code = "slow_consumer"
    status = 429


class EngineFailure(StreamEngineError):
    code = "engine_error"
    retryable = True


class StartupError(StreamEngineError):
    pass


def from_code(code: str, message: str, *, param: str | None = None) -> StreamEngineError:
    """The error that ``code`` names, for errors that crossed a process border."""
    for kind in _leaves(StreamEngineError):
        if kind.code == code:
            return kind(message, param=param)
    return StreamEngineError(message, param=param)


def _leaves(kind: type[StreamEngineError]) -> list[type[StreamEngineError]]:
    below = [leaf for child in kind.__subclasses__() for leaf in _leaves(child)]
    return below or [kind]
