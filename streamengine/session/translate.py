"""Between the words of the wire and the engine's: pure functions, one direction each."""

from base64 import b64encode
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamengine.calls.parser import CallHead
from streamengine.checks import exact_integer, shown
from streamengine.engine import Generate
from streamengine.errors import InvalidRequest, ModelNotFound, StreamEngineError, UnsupportedFeature
from streamengine.log import Log, TokenLogprob
from streamengine.sampling import MAX_LOGPROBS, SamplingParams
from streamengine.timing import Timing
from streamengine_sdk import wire

SAMPLING = set(SamplingParams.__struct_fields__) & set(wire.Generate.__struct_fields__) - {"logprobs"}
"""They have one name and one meaning on both sides. ``logprobs`` are two fields on the wire, as in the field's APIs."""

JSON_FORMATS = ("json_object", "json_schema")
DETAILS = ("available_from", "prompt_tokens", "limit")
"""Numbers of an error that have a field of their own on the wire."""


def to_generate(message: wire.Generate, model: str) -> Generate:
    """What the engine is asked for. ``metadata`` stays here: it cannot change an answer.

    Raises:
        RequestError: for a value out of range, another model, or what this engine cannot do; by field.
    """
    if message.model is not UNSET and message.model != model:
        raise ModelNotFound(f"model {shown(message.model)} is not served here, only {model!r}", param="model")
    if message.delivery.values:
        check_values(is_json=(message.response_format or {}).get("type") in JSON_FORMATS)
    given = {name: value for name in SAMPLING if (value := getattr(message, name)) is not UNSET}
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    timeouts = message.timeouts or wire.Timeouts()
    return Generate(
        prompt=_or_none(message.prompt),
        messages=None if message.messages is UNSET else tuple(message.messages),
        token_ids=None if message.token_ids is UNSET else tuple(message.token_ids),
        sampling=SamplingParams(**sampling, logprobs=_top_logprobs(message)),
        queue_s=_or_none(timeouts.queue_s),
        total_s=_or_none(timeouts.total_s),
        priority=message.priority or 0,
        response_format=_or_none(message.response_format),
        close_document=message.close_document or False,
        tools=_or_none(message.tools),
        tool_choice=_or_none(message.tool_choice),
        parallel_tool_calls=_or_none(message.parallel_tool_calls),
        chat_template_kwargs=_or_none(message.chat_template_kwargs),
        continues=None if message.continues is UNSET else tuple(message.continues),
    )


def check_values(*, is_json: bool) -> None:
    """Raises `UnsupportedFeature` where values are asked of an answer that has none."""
    if not is_json:
        raise UnsupportedFeature(
            f"delivery.values needs a response_format of type {' or '.join(JSON_FORMATS)}", param="delivery.values"
        )


def _top_logprobs(message: wire.Generate) -> int | None:
    top = message.top_logprobs or 0
    exact_integer("top_logprobs", top, 0, MAX_LOGPROBS)
    if top and not message.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
    return top if message.logprobs else None


def to_progress(id: str, log: Log) -> wire.Progress:
    if not log.started:
        return wire.Progress(
            id=id,
            phase="queued",
            prompt_tokens=log.prompt_tokens,
            queue_position=_or_unset(log.queue_position),
        )
    return wire.Progress(
        id=id,
        phase="prefill",
        prompt_tokens=log.prompt_tokens,
        prefilled_tokens=log.computed,
        cached_tokens=log.cached_tokens or UNSET,
    )


def to_call(call: CallHead) -> wire.Call:
    return wire.Call(index=call.index, id=_or_unset(call.id), name=_or_unset(call.name))


def to_logprob(item: TokenLogprob) -> wire.Logprob:
    """Bytes that are no text by themselves travel as base64."""
    whole = item.text.encode() == item.bytes
    return wire.Logprob(
        token=item.token,
        logprob=item.logprob,
        text=item.text if whole else UNSET,
        b64=UNSET if whole else b64encode(item.bytes).decode(),
        top=[to_logprob(top) for top in item.top] or UNSET,
    )


def to_terminal(id: str, log: Log, delivery: wire.DeliveryStats | UnsetType = UNSET) -> wire.Done | wire.Error:
    """The last message of a log that has ended."""
    if log.outcome is None:
        assert log.error is not None, "a log that ended has a terminal"
        usage = _convert(log.error_usage, wire.Usage)
        return to_error(log.error, id=id, stream=log.id, seq=len(log), usage=usage)
    outcome = log.outcome
    assert outcome.finish_reason != "error", "an error is a terminal of its own"
    size, crc32 = log.check
    return wire.Done(
        id=id,
        seq=len(log) + 1,
        stream=log.id,
        finish_reason=outcome.finish_reason,
        usage=_convert(outcome.usage, wire.Usage),
        check=wire.Check(bytes=size, crc32=crc32),
        timing=_to_timing(outcome.timing),
        cause=_or_unset(outcome.cause),
        stop_sequence=_or_unset(outcome.stop_sequence),
        guided=_convert(outcome.guided, wire.Guided),
        delivery=delivery,
    )


def to_error(error: StreamEngineError, *, retry_after_ms: int | None = None, **more: Any) -> wire.Error:
    """``more`` says what it is about: the ``id`` that it is the terminal of, a ``ref``, or that it is ``fatal``."""
    numbers: dict[str, Any] = {name: error.details[name] for name in DETAILS if name in error.details}
    return wire.Error(
        code=error.code,
        message=error.message,
        status=error.status,
        retryable=error.retryable,
        retry_after_ms=_or_unset(retry_after_ms),
        param=_or_unset(error.param),
        **numbers,
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
