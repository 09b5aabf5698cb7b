"""Between the words of the wire and the engine's: pure functions, one direction each."""

from typing import Any

import msgspec
from msgspec import UNSET

from streamengine.engine import Generate
from streamengine.errors import ModelNotFound, StreamEngineError, UnsupportedFeature
from streamengine.log import Log, Timing
from streamengine.request import SamplingParams
from streamengine_sdk import wire

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")

# Known to the protocol, not there yet: refused by name, unless they ask for what happens anyway.
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "priority": 0,
    "key": UNSET,
}
NEUTRAL_DELIVERY: dict[str, Any] = {"window": 0, "on_disconnect": "cancel", "linger_s": 0, "values": False, "pad": 0}


def to_generate(message: wire.Generate, model: str) -> Generate:
    """What the engine is asked for. ``metadata`` stays here: it cannot change an answer.

    Raises:
        RequestError: for a value out of range, another model, or what this engine cannot do; by field.
    """
    if message.model is not UNSET and message.model != model:
        raise ModelNotFound(f"model {message.model!r} is not served here, only {model!r}", param="model")
    _refuse_unless_neutral(message, NEUTRAL, "")
    _refuse_unless_neutral(message.delivery, NEUTRAL_DELIVERY, "delivery.")
    sampling = {name: getattr(message, name) for name in SAMPLING if getattr(message, name) is not UNSET}
    timeouts = message.timeouts or wire.Timeouts()
    return Generate(
        prompt=_or_none(message.prompt),
        messages=None if message.messages is UNSET else tuple(message.messages),
        token_ids=None if message.token_ids is UNSET else tuple(message.token_ids),
        sampling=SamplingParams(**sampling, stop=tuple(message.stop or ())),
        queue_s=_or_none(timeouts.queue_s),
        total_s=_or_none(timeouts.total_s),
    )


def _refuse_unless_neutral(message: msgspec.Struct, neutral: dict[str, Any], prefix: str) -> None:
    for name, value in neutral.items():
        given = getattr(message, name)
        if given is not UNSET and given != value:
            raise UnsupportedFeature(f"{prefix}{name} is not supported by this engine", param=prefix + name)


def to_progress(id: str, log: Log) -> wire.Progress:
    if not log.started:
        return wire.Progress(
            id=id,
            phase="queued",
            prompt_tokens=log.prompt_tokens,
            queue_position=_or_unset(log.queue_position),
        )
    return wire.Progress(id=id, phase="prefill", prompt_tokens=log.prompt_tokens, prefilled_tokens=log.computed)


def to_terminal(id: str, log: Log) -> wire.Done | wire.Error:
    """The last message of a log that has ended."""
    if log.outcome is None:
        assert log.error is not None, "a log that ended has a terminal"
        usage = _convert(log.error_usage, wire.Usage)
        return to_error(log.error, id, stream=log.id, seq=len(log), usage=usage)
    outcome = log.outcome
    assert outcome.finish_reason != "error", "an error is a terminal of its own"
    size, crc32 = log.check
    return wire.Done(
        id=id,
        seq=len(log) + 1,
        finish_reason=outcome.finish_reason,
        usage=_convert(outcome.usage, wire.Usage),
        check=wire.Check(bytes=size, crc32=crc32),
        timing=_to_timing(outcome.timing),
        cause=_or_unset(outcome.cause),
        stop_sequence=_or_unset(outcome.stop_sequence),
    )


def to_error(error: StreamEngineError, id: str, **more: Any) -> wire.Error:
    """The terminal of request ``id``."""
    return wire.Error(
        code=error.code,
        message=error.message,
        status=error.status,
        retryable=error.retryable,
        param=_or_unset(error.param),
        id=id,
        **more,
    )


def _to_timing(timing: Timing) -> wire.Timing:
    median, high, longest = timing.itl_p50_ms, timing.itl_p99_ms, timing.itl_max_ms
    between = None
    if median is not None and high is not None and longest is not None:
        between = wire.InterToken(p50=median, p99=high, max=longest)
    return msgspec.structs.replace(_convert(timing, wire.Timing), itl_ms=between)


def _convert(value: Any, kind: type) -> Any:
    """Same names on both sides: only the type changes."""
    return UNSET if value is None else msgspec.convert(value, kind, from_attributes=True)


def _or_unset(value: Any) -> Any:
    return UNSET if value is None else value


def _or_none(value: Any) -> Any:
    return None if value is UNSET else value
