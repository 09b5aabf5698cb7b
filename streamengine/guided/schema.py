"""A client's JSON Schema, checked and made ready for the grammar engine. Pure: no engine, no clock.

In this order: limits, so that nothing after them can take long; validity against the meta-schema; what cannot be kept
exactly; and a normal form.
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import jsonschema
import msgspec
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from streamengine.checks import shown
from streamengine.errors import GrammarError
from streamengine.guided.exact import check_exact
from streamengine.guided.normal import normalise
from streamengine.guided.places import Schema, is_place, names, walk

MAX_BYTES = 128 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 5_000
MAX_OPTIONAL = 400
MAX_ENUM = 10_000
MAX_PATTERN = 2_000
MAX_REPEAT = 10_000
"""Of the counts in a pattern: each step of a long one costs the engine more than the one before."""

_DEFAULT_DRAFT = "https://json-schema.org/draft/2020-12/schema"

_COUNTS = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")


def prepare(schema: Any, *, lenient: bool = False) -> str:
    """The text of the normal form of ``schema``, see `normal`.

    Raises:
        GrammarError: over a limit, with both numbers, or not a schema, with the place.
    """
    if not isinstance(schema, dict):
        raise GrammarError(f"a schema for an answer is an object, not {type(schema).__name__}")
    _check_size(schema)
    _check_limits(schema)
    _check_valid(schema)
    if not lenient:
        check_exact(schema)
    return msgspec.json.encode(normalise(schema, strict=not lenient)).decode()


def _check_size(schema: Schema) -> None:
    try:
        size = len(msgspec.json.encode(schema))
    except (RecursionError, TypeError, ValueError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
    if size > MAX_BYTES:
        raise GrammarError(f"the schema has {size} bytes, the limit is {MAX_BYTES}")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH}")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_limits(schema: Schema) -> None:
    properties = values = 0
    for place, one in walk(schema, "$"):
        own = one.get("properties")
        required = one.get("required")
        if isinstance(own, dict):
            properties += len(own)
            optional = len(own.keys() - set(filter(_is_text, required))) if isinstance(required, list) else len(own)
            if optional > MAX_OPTIONAL:
                raise GrammarError(f"{place} has {optional} optional properties, the limit is {MAX_OPTIONAL}")
        enum = one.get("enum")
        values += len(enum) if isinstance(enum, list) else 0
        patterns = [one.get("pattern"), *(keys if isinstance(keys := one.get("patternProperties"), dict) else ())]
        for pattern in filter(_is_text, patterns):
            if len(pattern) > MAX_PATTERN:
                raise GrammarError(f"a pattern at {place} has {len(pattern)} characters, the limit is {MAX_PATTERN}")
            check_repeats(pattern, f" at {place}")
        if isinstance(reference := one.get("$ref"), str) and not is_place(reference):
            raise GrammarError(f"{place}.$ref leads to {reference[:100]!r}, where no schema stands")
        if one.get("$schema", (draft := schema.get("$schema"))) != draft:
            raise GrammarError(f"{place}.$schema differs from that of the whole")
    known: set[str] = set()
    for place, name in names(schema):
        if name in known:
            raise GrammarError(f"{place} is {shown(name)}, which another part is called: references would be ambiguous")
        known.add(name)
    if properties > MAX_PROPERTIES:
        raise GrammarError(f"the schema has {properties} properties, the limit is {MAX_PROPERTIES}")
    if values > MAX_ENUM:
        raise GrammarError(f"the schema has {values} enum values, the limit is {MAX_ENUM}")


def check_repeats(pattern: str, where: str = "") -> None:
    """Raises `GrammarError` for a count above `MAX_REPEAT`."""
    for count in chain.from_iterable(_COUNTS.findall(pattern)):
        if len(count) > 9 or int(count or 0) > MAX_REPEAT:
            raise GrammarError(f"a pattern{where} repeats {count[:20]} times, the limit is {MAX_REPEAT}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _check_valid(schema: Schema) -> None:
    draft = schema.get("$schema", _DEFAULT_DRAFT)
    try:
        validator = validator_for({"$schema": draft}, default=None)
    except (AttributeError, TypeError, ValueError):  # it is looked up as the URI that it should be
        validator = None
    if validator is None or validator is jsonschema.Draft3Validator:
        raise GrammarError(f"$schema is {shown(draft)}; drafts 4 to 2020-12 are supported")
    try:
        # Patterns are ECMA's, which Python's `re` does not know; the grammar engine judges them.
        validator.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
    except SchemaError as error:
        raise GrammarError(f"not a valid schema at {error.json_path}: {error.message[:200]}") from error
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply to be checked") from error
