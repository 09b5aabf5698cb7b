"""A client's JSON Schema, checked and made ready for the grammar engine. Pure: no engine, no clock.

Three steps, in this order: limits, so that nothing after them can take long; validity against the
meta-schema; and a normalised copy, in which what says nothing is dropped, because the engine refuses
every keyword that it does not enforce. A keyword that says something is never dropped.
"""

import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import jsonschema
import msgspec
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from streamengine.errors import GrammarError

MAX_BYTES = 128 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 5_000
MAX_OPTIONAL = 400
MAX_ENUM = 10_000
MAX_PATTERN = 2_000
MAX_REPEAT = 10_000
"""Of the counts in a pattern: each step of a long one costs the engine more than the one before."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are enforced; any other is an annotation, as the standard has it."""

_YEAR = "^([1-9]|0[1-9]|00[1-9]|000[1-9])"
"""Of dates: a year 0 is valid, but most languages have no such date, so an answer never says it."""

_ONE = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("items", "additionalItems", "unevaluatedItems", "contains"),
        *("not", "if", "then", "else", "contentSchema"),
    }
)
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "not": (False,),
}
"""Keyword → values with which it says nothing."""

_COUNTS = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")
_WORDS = frozenset({"enum", "const", "type", "title", "description"})
"""Of a schema for some words."""

Schema = dict[str, Any]


def prepare(schema: Any) -> str:
    """The normalised text of ``schema``, in the order of its keys.

    Raises:
        GrammarError: over a limit, with both numbers, or not a schema, with the place.
    """
    if not isinstance(schema, dict):
        raise GrammarError(f"a schema for an answer is an object, not {type(schema).__name__}")
    _check_size(schema)
    _check_limits(schema)
    _check_valid(schema)
    normal = _normalise(schema)
    for _, one in _walk(normal, "$"):
        _name_properties(one, normal)
    return msgspec.json.encode(normal).decode()


def places_of(text: str, keywords: Collection[str]) -> list[str]:
    """Where a schema has one of ``keywords``, e.g. ``$.properties.age.not``; the first few places."""
    schemas = _walk(msgspec.json.decode(text), "$")
    places = [f"{place}.{keyword}" for place, one in schemas for keyword in keywords if keyword in one]
    return sorted(places)[:3]


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
    for place, one in _walk(schema, "$"):
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
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        # Patterns are ECMA's, which Python's `re` does not know; the grammar engine judges them.
        validator.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
    except SchemaError as error:
        raise GrammarError(f"not a valid schema at {error.json_path}: {error.message[:200]}") from error
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply to be checked") from error


def _walk(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that stands where a schema may stand: never in ``enum``, ``const`` or ``default``."""
    waiting = [(place, schema)]
    while waiting:
        place, one = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield place, one
        waiting.extend(_parts(one, place))


def _parts(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in _MAP and isinstance(value, dict):
            yield from ((f"{place}.{key}.{name}", part) for name, part in value.items())
        elif key in _LIST and isinstance(value, list):
            yield from ((f"{place}.{key}[{i}]", part) for i, part in enumerate(value))
        elif key in _ONE:
            yield f"{place}.{key}", value


def _normalise(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    normal = {key: _normalise_part(key, value) for key, value in schema.items() if _says_something(key, value, schema)}
    if "oneOf" in normal:
        # The engine proves that branches exclude each other only where it merges them with a sibling.
        normal.setdefault("anyOf", [{}])
    if normal.get("format") in ("date", "date-time"):
        normal["allOf"] = [*normal.get("allOf", ()), {"pattern": _YEAR}]
    return normal


def _normalise_part(key: str, value: Any) -> Any:
    if key in _MAP and isinstance(value, dict):
        return {name: _normalise(part) for name, part in value.items()}
    if key in _LIST and isinstance(value, list):
        return [_normalise(part) for part in value]
    return _normalise(value) if key in _ONE else value


def _name_properties(one: Schema, root: Schema) -> None:
    """``propertyNames`` that are some words, as typed maps have them, say the same as ``properties``, which the engine
    can enforce."""
    names = one.get("propertyNames")
    if isinstance(names, dict) and isinstance(names.get("$ref"), str) and len(names) == 1:
        _, _, place = names["$ref"].partition("#/")
        group, _, name = place.partition("/")
        names = root.get(group, {}).get(name)
    if not isinstance(names, dict) or names.keys() - _WORDS or names.get("type", "string") != "string":
        return
    words = names["enum"] if "enum" in names else [names["const"]] if "const" in names else []
    value = one.get("additionalProperties", True)
    small = len(words) <= MAX_OPTIONAL and len(words) * len(msgspec.json.encode(value)) <= MAX_BYTES
    if words and small and all(map(_is_text, words)) and not one.keys() & {"properties", "patternProperties"}:
        del one["propertyNames"]
        one |= {"properties": dict.fromkeys(words, value), "additionalProperties": False}


def _says_something(key: str, value: Any, schema: dict[str, Any]) -> bool:
    match key:
        case "x-guidance":  # options of the engine, which are ours to set
            return False
        case "format":
            return value in FORMATS
        case "then" | "else":
            return "if" in schema
        case "if":
            return "then" in schema or "else" in schema
        case "minContains" | "maxContains" if "contains" not in schema:
            return False
    # `0 == False` in Python; in JSON it is not.
    return not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(key, ()))
