"""What a caller asks for, made into the message that starts it; whatever cannot be sent is refused by name."""

import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypedDict

import msgspec

from streamengine_sdk import wire
from streamengine_sdk.errors import InvalidRequest
from streamengine_sdk.output import Output
from streamengine_sdk.settings import Timeouts


class Options(TypedDict, total=False):
    """What a request may say beside its prompt. ``None`` is the same as leaving it out.

    ``messages`` (a chat) or ``token_ids`` take the place of the prompt. ``return_token_ids`` asks for the ids
    of the answer in `Delta.tokens` and `Result.token_ids`, ``logprobs`` for its log-probabilities in the fields of
    that name, with ``top_logprobs`` likeliest tokens beside each; a request of higher ``priority`` goes first;
    ``timeouts`` replaces the client's. ``output`` is what the answer shall be – a JSON schema, a ``Literal[...]`` or
    a pydantic model class – and comes back in `Result.parsed`; with ``close_document`` it is completed while
    ``max_tokens`` still allows it. Requests with the same ``key`` are one: the second
    shows the stream of the first. ``linger_s`` is how long the server goes on without a reader after a connection
    broke. The others have the names and meanings of the Chat Completions API or else of vLLM's sampling
    parameters, and the server's defaults.
    """

    messages: Sequence[Mapping[str, Any]] | None
    token_ids: Sequence[int] | None
    model: str | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int | str, float] | None
    bad_words: Sequence[str | Sequence[int]] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    response_format: Mapping[str, Any] | None
    close_document: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    output: Any
    priority: int | None
    metadata: Mapping[str, str] | None
    key: str | None
    linger_s: float | None
    return_token_ids: bool | None
    timeouts: Timeouts | None


def build(
    id: str, prompt: str | None, options: Options, timeouts: Timeouts, delivery: wire.Delivery
) -> tuple[wire.Generate, Output | None]:
    """The message of one request, with a key of its own, and what is to be made of its answer.

    Raises:
        InvalidRequest: for what cannot be sent.
        TypeError: an unknown option, or an ``output`` that is none.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.pop("timeouts", None)
    wanted = given.pop("output", None)
    output = None if wanted is None else Output.of(wanted)
    if output is not None and "response_format" in given:
        raise InvalidRequest("give output or response_format, not both", param="response_format")
    if prompt is not None:
        given["prompt"] = prompt
    sources = [name for name in ("prompt", "messages", "token_ids") if name in given]
    if len(sources) != 1:
        text = f"give exactly one of prompt, messages and token_ids, not {' and '.join(sources) or 'none'}"
        raise InvalidRequest(text, param=sources[-1] if sources else "prompt")
    for name, value in given.items():
        try:
            given[name] = _TRANSLATE.get(name, _exact)(value)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} cannot be sent: {error}", param=name) from None
    wishes = {"token_ids": given.pop("return_token_ids", False), "values": output is not None and output.is_json}
    if "linger_s" in given:
        wishes["linger_s"] = given.pop("linger_s")
    if output is not None:
        given["response_format"] = output.response_format
    if timeouts.queue is not None:
        given["timeouts"] = {"queue_s": timeouts.queue}
    given["delivery"] = {**msgspec.to_builtins(delivery), **wishes}
    given.setdefault("key", secrets.token_hex(16))
    try:
        return msgspec.convert({"id": id, **given}, wire.Generate), output
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=wire.field_of(str(error))) from None


def check_encodable(message: wire.ClientMessage) -> int:
    """Its length in characters. Raises `InvalidRequest` for what JSON cannot hold."""
    try:
        return len(wire.encode(message))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request is no JSON: {error}") from None


def _exact(value: Any) -> Any:
    """Numbers as JSON has them, whatever library they are from."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    if not isfinite(value):
        raise ValueError(f"{value} is no number in JSON")
    return float(value)


def _ids(value: Any) -> list[int]:
    return list(map(operator.index, value))


def _objects(value: Any) -> list[Any]:
    return [dict(it) if isinstance(it, Mapping) else it for it in value]


_TRANSLATE: dict[str, Callable[[Any], Any]] = {
    "token_ids": _ids,
    "stop_token_ids": _ids,
    "allowed_token_ids": _ids,
    "bad_words": lambda words: [word if isinstance(word, str) else _ids(word) for word in words],
    "logit_bias": lambda biases: {str(token): _exact(bias) for token, bias in biases.items()},
    "messages": _objects,
    "tools": _objects,
    "response_format": dict,
    "chat_template_kwargs": dict,
    "metadata": dict,
    "stop": lambda stops: [stops] if isinstance(stops, str) else list(stops),
}
