"""What a stream yields, for ``match``, and what it ends in.

Fields that the server left out hold `UNSET`, which is falsy.
"""

from dataclasses import dataclass

from msgspec import UNSET

from streamengine_sdk.wire import (
    Cause,
    Check,
    Delta,
    Done,
    FinishReason,
    InterToken,
    Logprob,
    Phase,
    Progress,
    Timing,
    Usage,
)

__all__ = [
    "UNSET",
    "Cause",
    "Check",
    "Delta",
    "Done",
    "Event",
    "FinishReason",
    "InterToken",
    "Logprob",
    "Phase",
    "Progress",
    "Result",
    "Timing",
    "Usage",
]

Event = Progress | Delta | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole answer; or, as ``partial`` of an error, as much of it as had arrived.

    Args:
        text: without the stop string that ended it.
        token_ids: of the answer, the one that ended it included; ``None`` unless asked for.
        logprobs: one for each answer token; likewise.
        usage: token counts; ``None`` where the server did not say.
        timing: on the server's clock; likewise.
        finish_reason: ``None`` while it has not finished.
        stop_sequence: the stop string that ended it.
        cause: who cancelled it, where ``finish_reason`` is ``cancelled``.
        stream_id: the server's name for the stream; ``None`` until it was accepted.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Logprob, ...] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    cause: Cause | None = None
    stream_id: str | None = None
