"""Calls and their results in the messages of a conversation: read from a client, and written for a template."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from streamengine.calls.format import CallFormat, Message, Tool
from streamengine.checks import check_text
from streamengine.errors import InvalidRequest

SHORT_ID = 9


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: _Function
    type: str = "function"
    index: int | None = None


def read_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """``tool_calls`` of a message, as templates see them: with their arguments as objects.

    Raises:
        InvalidRequest: ``param`` names the place.
    """
    try:
        calls = msgspec.convert(value, list[_Call])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{place}: {error}", param=place) from error
    return [_read_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: _Call, place: str) -> dict[str, Any]:
    name = check_text(call.function.name, f"{place}.function.name")
    place = f"{place}.function.arguments"
    try:
        arguments = msgspec.json.decode(check_text(call.function.arguments, place) or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{place} is no JSON: {error}", param=place) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{place} must be a JSON object", param=place)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def has_calls(messages: Sequence[Message]) -> bool:
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def characters(message: Message) -> int:
    """That any template writes for it at least."""
    calls = message.get("tool_calls", ())
    return len(message["content"]) + sum(len(_text(call["function"]["arguments"], compact=True)) for call in calls)


def for_template(messages: Sequence[Message], format: CallFormat) -> list[Message]:
    """With calls and ids as a template wants them that knows tools."""
    return [_native(message, format) for message in messages]


def _native(message: Message, format: CallFormat) -> Message:
    if "tool_call_id" in message and format.short_ids:
        return {**message, "tool_call_id": message["tool_call_id"][-SHORT_ID:]}
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        name, arguments = call["function"].values()
        function = {"name": name, "arguments": _text(arguments) if format.as_text else arguments}
        calls.append({**call, "id": call["id"][-SHORT_ID:] if format.short_ids else call["id"], "function": function})
    return {**message, "tool_calls": calls}


def in_words(messages: Sequence[Message], tools: Sequence[Tool], format: CallFormat) -> list[Message]:
    """For a template that knows no tools: calls as text, results as what a user says, tools in the system message."""
    told: list[Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if told and told[-1]["role"] == "tool":
                content = f"{told.pop()['content']}\n{content}"
        elif calls := message.get("tool_calls"):
            written = format.write([(call["function"]["name"], _text(call["function"]["arguments"])) for call in calls])
            content = f"{content}\n{written}" if content else written
        told.append({"role": message["role"], "content": content})
    told = [{**message, "role": "user"} if message["role"] == "tool" else message for message in told]
    if not tools:
        return told
    listed = "\n".join(_text(tool["function"]) for tool in tools)
    example = format.write([("the tool's name", "{its arguments as JSON}")])
    words = (
        f"You can call these tools, of which each is described by a line of JSON:\n{listed}\n\n"
        f"To call one, answer with\n{example}\nYou are then told what it gave."
    )
    if told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def _text(value: Any, *, compact: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)
