"""How a model writes calls of tools, learnt from its chat template: what it writes around the names and arguments of
two calls that are easily found again. Pure but for the rendering, which is an argument.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from streamengine.errors import InvalidRequest, UnsupportedFeature

NAME = "[A-Za-z0-9_-]{1,64}"
"""Of a tool."""

Message = dict[str, Any]
Tool = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""Messages and tools → a prompt. Raises InvalidRequest where the template refuses them."""

_SAID = "qPlainWordsq"
_CALLS = (("sentinel_one", {"key_one": "value_one"}), ("sentinel_two", {"key_two": "value_two"}))
_ID = re.compile(r',\s*"id":\s*"call\w*"')
_NOT_LEARNT = "tools are not supported with this model's chat template: "


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Calls are ``first NAME middle {…} between NAME middle {…} last``.

    Args:
        marker: the beginning of ``first``; text that holds it is none. Where calls begin like any JSON, a text that
            begins like it is none (`leads`).
        between: empty where a message holds one call.
        tokens: texts within these that are a token of their own each, with its id.
        native: the template writes tools and calls itself; otherwise they are put into words of ours.
        as_text: it wants arguments as JSON text, not as objects.
        short_ids: it takes ids of calls of 9 characters only.
    """

    first: str
    middle: str
    between: str
    last: str
    marker: str
    tokens: tuple[tuple[str, int], ...] = ()
    native: bool = True
    as_text: bool = False
    short_ids: bool = False

    @property
    def leads(self) -> bool:
        return self.marker in "{["

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Names and arguments as the model writes them."""
        written = self.between.join(f"{name}{self.middle}{arguments}" for name, arguments in calls)
        return f"{self.first}{written}{self.last}"


IN_WORDS = CallFormat(
    first='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    last="}\n</tool_call>",
    marker="<tool_call>",
    native=False,
)
"""For templates that know nothing of tools."""


def learn(render: Render, tokens: Mapping[str, int]) -> CallFormat:
    """What ``render``'s template makes of calls. ``tokens`` are the added tokens of the vocabulary, by their text.

    Raises:
        UnsupportedFeature: it knows tools, and writes calls in a way that is not understood here; why.
    """
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": {}}} for name, _ in _CALLS
    ]
    if _CALLS[0][0] not in _rendered(render, [_user()], tools):
        return _with_tokens(IN_WORDS, tokens)
    text, as_text, short_ids = _one_call(render, tools)
    plain = _rendered(render, [_user(), {"role": "assistant", "content": _SAID}], tools)
    first, middle, last = _around(text, plain, 1)
    if last.startswith(first) or re.match(NAME, middle) or not first:
        raise UnsupportedFeature(f"{_NOT_LEARNT}names do not stand out", param="tools")
    between = ""
    try:
        text = render([_user(), _assistant(2, as_text, short_ids)], tools)
    except InvalidRequest:
        pass  # one call in a message is all it takes
    else:
        *same, between, again, end = _around(text, plain, 2)
        if [*same, again, end] != [first, middle, middle, last] or not between or last.startswith(between):
            raise UnsupportedFeature(f"{_NOT_LEARNT}two calls differ from one", param="tools")
    format = CallFormat(
        first=first, middle=middle, between=between, last=last, marker="", as_text=as_text, short_ids=short_ids
    )
    format = _with_tokens(format, tokens)
    marker = next((token for token, _ in format.tokens if first.startswith(token)), "")
    marker = marker or re.split(r"[\s{]", first, maxsplit=1)[0] or first[0]
    return msgspec.structs.replace(format, marker=marker)


def _one_call(render: Render, tools: Sequence[Tool]) -> tuple[str, bool, bool]:
    """A call as the template has it, and how it wants it."""
    refusal = ""
    for as_text, short_ids in ((False, False), (True, False), (False, True), (True, True)):
        try:
            text = render([_user(), _assistant(1, as_text, short_ids)], tools)
        except InvalidRequest as error:
            refusal = error.message
            continue
        if as_text or json.dumps(json.dumps(_CALLS[0][1])) not in text:
            return text, as_text, short_ids
    raise UnsupportedFeature(f"{_NOT_LEARNT}{refusal}", param="tools")


def _around(text: str, plain: str, count: int) -> list[str]:
    """What stands before, between and behind the names and arguments of ``count`` calls in ``text``.

    ``plain`` is the same with words in their place, which tells where the message begins and ends.
    """
    begin = _same(text, plain)
    end = _same(text[:begin:-1], plain[:begin:-1])
    body = text[begin : len(text) - end].strip()
    parts, at = [], 0
    for name, arguments in _CALLS[:count]:
        ((key, value),) = arguments.items()
        for wanted in (re.escape(name), rf'\{{\s*"{key}"\s*:\s*"{value}"\s*\}}'):
            match = re.compile(wanted).search(body, at)
            if match is None:
                raise UnsupportedFeature(f"{_NOT_LEARNT}calls are no name and JSON after it", param="tools")
            parts.append(_ID.sub("", body[at : match.start()]))
            at = match.end()
    return [*parts, _ID.sub("", body[at:])]


def _same(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _rendered(render: Render, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    try:
        return render(messages, tools)
    except InvalidRequest as error:
        raise UnsupportedFeature(f"{_NOT_LEARNT}{error.message}", param="tools") from error


def _with_tokens(format: CallFormat, tokens: Mapping[str, int]) -> CallFormat:
    markup = "\0".join((format.first, format.middle, format.between, format.last))
    found = tuple((text, token) for text, token in tokens.items() if text in markup and not text.isspace())
    return msgspec.structs.replace(format, tokens=tuple(sorted(found, key=lambda one: -len(one[0]))))


def _user() -> Message:
    return {"role": "user", "content": "hello"}


def _assistant(count: int, as_text: bool, short_ids: bool) -> Message:
    calls = [
        {
            "id": f"call{index:05}" if short_ids else f"call_{index:024}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
        }
        for index, (name, arguments) in enumerate(_CALLS[:count])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
