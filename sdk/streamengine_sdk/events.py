"""What a stream yields, for ``match``, and what it ends in.

Fields that the server left out hold `UNSET`, which is falsy. Where the protocol lists words (a phase, a channel,
a finish reason), a newer server may use another one.
"""

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET

from streamengine_sdk.wire import (
    Call,
    Cause,
    Check,
    ClientMessage,
    Delta,
    Done,
    FinishReason,
    Guided,
    InterToken,
    Logprob,
    Phase,
    Progress,
    ServerMessage,
    Timing,
    Unknown,
    Usage,
    Value,
)

__all__ = [
    "UNSET",
    "Call",
    "Cause",
    "Check",
    "Delta",
    "Done",
    "Event",
    "FinishReason",
    "Guided",
    "InterToken",
    "Logprob",
    "Phase",
    "Progress",
    "Result",
    "Timing",
    "ToolCall",
    "Trace",
    "Usage",
    "Value",
]

Event = Progress | Delta | Value | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What the model wants called; ``arguments`` is JSON text, whole only when the stream has finished."""

    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole answer; or, as ``partial`` of an error, as much of it as had arrived.

    Args:
        text: of the answer, without the stop string that ended it. A resumed stream has what came after its start.
        seq: the last token that arrived; with ``stream_id`` enough for `AsyncClient.resume`.
        parsed: ``text`` as what ``output`` asked for, where it was asked for and the answer is whole.
        reasoning: what the model wrote before its answer.
        tool_calls: what it wants called, in order.
        token_ids: of the answer, the one that ended it included; ``None`` unless asked for.
        logprobs: one for each answer token; likewise.
        usage: token counts; ``None`` where the server did not say.
        timing: on the server's clock; likewise.
        finish_reason: ``None`` while it has not finished.
        stop_sequence: the stop string that ended it.
        guided: of a schema that was not ``strict``, what was not enforced and whether the answer keeps to it.
        cause: who cancelled it, where ``finish_reason`` is ``cancelled``.
        stream_id: the server's name for the stream; ``None`` until it was accepted.
        continued: how often another server went on with the answer, because the one that had the stream was gone.
    """

    text: str
    seq: int = 0
    parsed: Any = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Logprob, ...] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    guided: Guided | None = None
    cause: Cause | None = None
    stream_id: str | None = None
    continued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What ``on_event`` of a client is told: a message that was ``sent`` or ``received``, a connection that is
    ``connected``, or one that was ``lost`` for this ``error`` and is replaced in ``retry_in`` seconds, if at all."""

    kind: Literal["connected", "sent", "received", "lost"]
    message: ClientMessage | ServerMessage | Unknown | None = None
    error: Exception | None = None
    retry_in: float | None = None
