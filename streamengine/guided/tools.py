"""``tools`` and ``tool_choice``: what a client lets a model call → a `Grammar` of answers with such calls. Pure.

The grammar begins at the marker of the model's way to write calls. What comes before is free text, where the choice is
``auto``; otherwise nothing does. Arguments are JSON of the tool's schema.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamengine.calls.format import NAME, CallFormat, Tool
from streamengine.checks import shown
from streamengine.errors import GrammarError, InvalidRequest
from streamengine.guided import schema
from streamengine.guided.grammar import WHITESPACE, Grammar
from streamengine.guided.normal import engine_options

MAX_TOOLS = 128
MAX_BYTES = schema.MAX_BYTES
"""Of the schemas of all tools."""

_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False}
"""How the engine reads a schema within a grammar; what a client says of that is dropped before."""


class _Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``strict`` changes nothing: arguments always keep to the schema."""

    name: Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _Named(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Name


class Toolbox(msgspec.Struct, frozen=True, kw_only=True):
    """Tools that may be called.

    Args:
        tools: as a template shows them.
        schemas: of those that may be called now: place in ``tools``, name, and normalised schema of the arguments.
        required: there is a call in any answer, and nothing beside.
        single: there is at most one.
    """

    tools: list[Tool]
    schemas: list[tuple[int, str, str]]
    required: bool
    single: bool


def read_tools(tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None) -> Toolbox | None:
    """None where nothing may be called.

    Raises:
        InvalidRequest: not a tool, or no choice among them; ``param`` names the place.
        GrammarError: parameters that are no schema, or over a limit.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        if tools is not None:
            raise InvalidRequest("tools must be a list", param="tools")
        tools = ()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(tools)} tools, at most {MAX_TOOLS}", param="tools")
    schemas: list[tuple[int, str, str]] = []
    listed: list[Tool] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = _read_tool(tool, f"tools[{index}]")
        if function.name in names:
            raise InvalidRequest(f"tools holds {function.name!r} twice", param=f"tools[{index}].function.name")
        names.add(function.name)
        schemas.append((index, function.name, _read_schema(function.parameters, _place(index))))
        listed.append(_listed(function))
    size = sum(len(text.encode()) for *_, text in schemas)
    if size > MAX_BYTES:
        raise InvalidRequest(f"the schemas of tools have {size} bytes, the limit is {MAX_BYTES}", param="tools")
    name = _read_choice(choice, names)
    if not listed or choice == "none":
        return None
    return Toolbox(
        tools=listed,
        schemas=[one for one in schemas if name in (None, one[1])],
        required=choice == "required" or name is not None,
        single=parallel is False or name is not None,
    )


def grammar_of(box: Toolbox, format: CallFormat) -> Grammar:
    """Of answers with calls, in Lark's syntax."""
    calls = [f"call_{index}" for index, *_ in box.schemas]
    more = "" if box.single or not format.between else " (between call)*"
    rules = [
        "%llguidance {}",
        f"start: {'first calls' if box.required else 'TEXT | first calls' if format.leads else 'TEXT | head calls'}",
        f"calls: call{more} last",
        f"call: {' | '.join(calls)}",
        f"first: {_literal(format.first, format)}",
        f"last: {_literal(format.last, format)}",
    ]
    if more:
        rules.append(f"between: {_literal(format.between, format)}")
    if not box.required:
        rules += _text_rules(format)
    for index, name, text in box.schemas:
        rules.append(f"call_{index}: {_literal(name + format.middle, format)} %json {text}")
    return Grammar(kind="tools", text="\n".join(rules))


def schemas_of(grammar: Grammar) -> Iterator[tuple[str, str]]:
    """The schemas within a grammar of `grammar_of`, each with its place in ``tools``."""
    for line in grammar.text.split("\n"):
        if line.startswith("call_"):
            index = line.removeprefix("call_").partition(":")[0]
            yield _place(int(index)), line.partition(" %json ")[2]


def _text_rules(format: CallFormat) -> list[str]:
    """Free text, and what leads on from there to a call. A text never holds a marker, however it is spelt in tokens."""
    if format.leads:
        return [f"TEXT: /([^{_escaped(format.marker)}](.|\\n)*)?/"]
    marker, rest = format.marker, format.first[len(format.marker) :]
    token = dict(format.tokens).get(marker)
    text = f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{_escaped(marker)}(.|\\n)*/"
    begin = f"begin[lazy]: TEXT {_quoted(marker)}" if token is None else f"begin: TEXT <[{token}]>"
    return [text, begin, f"head: begin {_literal(rest, format)}"]


def _literal(text: str, format: CallFormat) -> str:
    """Where a vocabulary has a token of its own for a part, models have learnt to write that, and nothing else."""
    for part, token in format.tokens:
        before, found, after = text.partition(part)
        if found:
            return f"{_literal(before, format)} <[{token}]> {_literal(after, format)}".strip()
    return _quoted(text) if text else ""


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _escaped(text: str) -> str:
    return "".join(letter if letter.isalnum() and letter.isascii() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _read_tool(value: Any, place: str) -> _Function:
    try:
        return msgspec.convert(value, _Tool).function
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{place}: {error}", param=place) from error


def _place(index: int) -> str:
    return f"tools[{index}].function.parameters"


def _read_schema(parameters: dict[str, Any] | None, place: str) -> str:
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise GrammarError(f"{place}.type must be 'object', not {shown(parameters['type'])}", param=place)
    try:
        prepared = schema.prepare({"type": "object", **parameters})
        options = {"x-guidance": {**_OPTIONS, **engine_options(prepared)}}
        return msgspec.json.encode({**options, **msgspec.json.decode(prepared)}).decode()
    except GrammarError as error:
        raise GrammarError(f"{place}: {error.message}", param=place) from error


def _listed(function: _Function) -> Tool:
    told = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def _read_choice(choice: Any, names: Collection[str]) -> str | None:
    """The name of the only tool that may be called, where there is one."""
    if choice in (None, "none", "auto"):
        return None
    if not names:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return None
    try:
        name = msgspec.convert(choice, _Named).function.name
    except msgspec.ValidationError as error:
        known = '\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": …}}'
        raise InvalidRequest(f"tool_choice must be {known}, not {shown(choice)}", param="tool_choice") from error
    if name not in names:
        raise InvalidRequest(f"tool_choice names {shown(name)}, which is no tool here", param="tool_choice")
    return name
