"""Every error that a client can meet. All carry ``partial``: what had arrived of the answer.

EngineError
├── RequestError                 this request was refused or cut; others are untouched
│   ├── InvalidRequest           a field is missing, unknown, of the wrong type, out of range or too large
│   ├── ContextLengthExceeded    prompt + answer do not fit the model
│   ├── UnsupportedFeature       the protocol knows it, this engine does not
│   ├── ModelNotFound
│   ├── RateLimited              too many requests: wait ``retry_after`` seconds
│   └── Overloaded               the queue is full, waited too long in it, or the server shuts down
├── EngineFailed                 the engine died or a step raised
├── ConnectError                 no connection came about; ``status`` is that of the HTTP answer, if there was one
│   └── Unauthorized             the token is missing or wrong
├── ConnectionLost               the connection ended while the answer was under way, and no other replaced it
├── StreamLost                   the server does not have the stream (any more), and no other could continue it
├── OutputInvalid                the whole answer is not what ``output`` asked for
├── ProtocolError                the server broke the protocol: a gap, a repeat, a wrong checksum
└── Timeout                      a deadline of `Timeouts` passed; ``kind`` names it
"""

from typing import TYPE_CHECKING, Literal

from msgspec import UNSET

from streamengine_sdk import wire

if TYPE_CHECKING:
    from streamengine_sdk.events import Result


class EngineError(Exception):
    """Base of all.

    Args:
        code: the protocol's name of the error.
        status: the matching HTTP status; ``None`` where there is none.
        param: the field at fault.
        retryable: the same request may succeed later.
        retry_after: seconds to wait before that.
        partial: what had arrived; ``None`` if the request was not sent.
    """

    code: str = "internal"
    status: int | None = None
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        param: str | None = None,
        retryable: bool | None = None,
        retry_after: float | None = None,
        partial: "Result | None" = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status
        if retryable is not None:
            self.retryable = retryable
        self.param = param
        self.retry_after = retry_after
        self.partial = partial


class RequestError(EngineError):
    code = "invalid_request"
    status = 400


class InvalidRequest(RequestError):
    """``param`` names the field wherever the server could tell."""


class ContextLengthExceeded(RequestError):
    """``prompt_tokens`` and ``limit`` are the server's numbers, if it gave them."""

    code = "context_length_exceeded"
    prompt_tokens: int | None = None
    limit: int | None = None


class UnsupportedFeature(RequestError):
    code = "unsupported_feature"
    status = 422


class ModelNotFound(RequestError):
    code = "model_not_found"
    status = 404


class RateLimited(RequestError):
    code = "rate_limited"
    status = 429
    retryable = True


class Overloaded(RequestError):
    code = "overloaded"
    status = 503
    retryable = True


class EngineFailed(EngineError):
    code = "engine_error"
    status = 500
    retryable = True


class ConnectError(EngineError):
    code = "connect_error"
    retryable = True


class Unauthorized(ConnectError):
    code = "unauthorized"
    status = 401
    retryable = False


class ConnectionLost(EngineError):
    """``close_code`` is that of the WebSocket; 1006 if it ended without one."""

    code = "connection_lost"
    retryable = True
    close_code: int = 1006


class StreamLost(EngineError):
    """``available_from`` is the first position that `AsyncClient.resume` could still go on after."""

    code = "stream_not_found"
    status = 404
    available_from: int | None = None


class OutputInvalid(EngineError):
    code = "output_invalid"


class ProtocolError(EngineError):
    code = "protocol_error"


class Timeout(EngineError):
    code = "timeout"
    retryable = True
    kind: Literal["connect", "first_token", "between", "total"] = "total"


KINDS: dict[str, type[EngineError]] = {
    "invalid_json": InvalidRequest,
    "invalid_message": InvalidRequest,
    "unknown_type": InvalidRequest,
    "invalid_request": InvalidRequest,
    "message_too_large": InvalidRequest,
    "grammar_error": InvalidRequest,
    "context_length_exceeded": ContextLengthExceeded,
    "unsupported_feature": UnsupportedFeature,
    "unauthorized": Unauthorized,
    "forbidden": RequestError,
    "model_not_found": ModelNotFound,
    "stream_not_found": StreamLost,
    "duplicate_id": RequestError,
    "resume_gap": StreamLost,
    "slow_consumer": RequestError,
    "too_many_streams": RateLimited,
    "rate_limited": RateLimited,
    "engine_error": EngineFailed,
    "internal": EngineFailed,
    "overloaded": Overloaded,
    "queue_timeout": Overloaded,
    "shutting_down": Overloaded,
}
"""What each code of the protocol is raised as."""

KINDS_BY_STATUS: dict[int, type[EngineError]] = {429: RateLimited, 503: Overloaded}


def from_wire(error: wire.Error) -> EngineError:
    """The exception for what the server said; a code that is newer than this client goes by its status."""
    kind = KINDS.get(error.code) or KINDS_BY_STATUS.get(error.status)
    kind = kind or (EngineFailed if error.status >= 500 else RequestError)
    raised = kind(
        error.message,
        code=error.code,
        status=error.status,
        param=error.param or None,
        retryable=error.retryable,
        retry_after=error.retry_after_ms / 1000 if error.retry_after_ms else None,
    )
    for name in ("available_from", "prompt_tokens", "limit"):
        if hasattr(raised, name) and (value := getattr(error, name)) is not UNSET:
            setattr(raised, name, value)
    return raised
