"""``response_format``: what an answer is to look like, in a client's words → a `Grammar`. Pure.

The shapes are OpenAI's for ``text``, ``json_object`` and ``json_schema``, and of the same make for the rest::

    {"type": "json_schema", "json_schema": {"name": "person", "schema": {…}, "strict": true}}
    {"type": "regex", "regex": "[a-z]+"}
    {"type": "grammar", "grammar": "start: …"}          # Lark's syntax
    {"type": "choice", "choice": ["yes", "no"]}
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamengine.checks import check_text
from streamengine.errors import InvalidRequest
from streamengine.guided import schema
from streamengine.guided.dialects import check_lark, check_pattern, choice_grammar
from streamengine.guided.grammar import Grammar

MAX_CHOICES = 10_000
MAX_LARK = 128 * 1024

Choice = Annotated[str, Meta(min_length=1, max_length=4096)]


class _Format(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Strict: a misspelt field is an error."""


class Text(_Format, frozen=True, tag="text"):
    pass


class JsonObject(_Format, frozen=True, tag="json_object"):
    pass


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` and ``description`` say nothing to the grammar. ``strict`` None is true: the default is to keep
    what was asked for."""

    schema: dict[str, Any] | bool
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class JsonSchema(_Format, frozen=True, kw_only=True, tag="json_schema"):
    json_schema: NamedSchema


class Regex(_Format, frozen=True, kw_only=True, tag="regex"):
    regex: Annotated[str, Meta(min_length=1, max_length=schema.MAX_PATTERN)]


class Lark(_Format, frozen=True, kw_only=True, tag="grammar"):
    grammar: Annotated[str, Meta(min_length=1, max_length=MAX_LARK)]
    syntax: Literal["lark"] = "lark"


class Choices(_Format, frozen=True, kw_only=True, tag="choice"):
    choice: Annotated[list[Choice], Meta(min_length=1, max_length=MAX_CHOICES)]


def read_format(value: Mapping[str, Any] | None) -> Grammar | None:
    """None where any text will do.

    Raises:
        InvalidRequest: no known format; ``param`` names the field.
        GrammarError: its schema is over a limit or none at all.
    """
    if value is None:
        return None
    try:
        asked = msgspec.convert(value, Text | JsonObject | JsonSchema | Regex | Lark | Choices)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"response_format: {error}", param="response_format") from error
    return _grammar(asked)


def _grammar(asked: Text | JsonObject | JsonSchema | Regex | Lark | Choices) -> Grammar | None:
    match asked:
        case Text():
            return None
        case JsonObject():
            return Grammar(kind="json_schema", text='{"type":"object"}')
        case JsonSchema(json_schema=named):
            lenient = named.strict is False
            return Grammar(kind="json_schema", text=schema.prepare(named.schema, lenient=lenient), lenient=lenient)
        case Regex(regex=pattern):
            check_pattern(check_text(pattern, "response_format"))
            return Grammar(kind="regex", text=pattern)
        case Lark(grammar=text):
            check_lark(check_text(text, "response_format"))
            return Grammar(kind="lark", text=text)
        case Choices(choice=choices):
            return Grammar(
                kind="lark", text=choice_grammar([check_text(choice, "response_format") for choice in choices])
            )
