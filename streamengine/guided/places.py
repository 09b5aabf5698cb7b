"""Where in a schema other schemas stand: never within ``enum``, ``const`` or ``default``, nor where a property is named
like a keyword. Pure.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

Schema = dict[str, Any]

_ONE = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("items", "additionalItems", "unevaluatedItems", "contains"),
        *("not", "if", "then", "else", "contentSchema"),
    }
)
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def walk(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that stands where a schema may stand, with its place."""
    waiting = [(place, schema)]
    while waiting:
        place, one = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield place, one
        waiting.extend(_parts(one, place))


def names(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every name that a reference may use, with its place; an anchor belongs to the ``$id`` around it."""
    keys = ("id",) if "draft-04" in str(schema.get("$schema")) else ("$id",)
    waiting: list[tuple[str, Any, str]] = [("$", schema, "")]
    while waiting:
        place, one, base = waiting.pop()
        if not isinstance(one, dict):
            continue
        for key in (*keys, "$anchor", "$dynamicAnchor"):
            if name := isinstance(given := one.get(key), str) and given:
                base, name = (name, name) if key in keys else (base, f"{base}#{name}")
                yield f"{place}.{key}", name
        waiting.extend((at, part, base) for at, part in _parts(one, place))


def _parts(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in _MAP and isinstance(value, dict):
            yield from ((f"{place}.{key}.{name}", part) for name, part in value.items())
        elif key in _LIST and isinstance(value, list):
            yield from ((f"{place}.{key}[{i}]", part) for i, part in enumerate(value))
        elif key in _ONE:
            yield f"{place}.{key}", value


def mapped(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` of the keyword ``key`` with all schemas in it changed."""
    if key in _MAP and isinstance(value, dict):
        return {name: change(part) for name, part in value.items()}
    if key in _LIST and isinstance(value, list):
        return [change(part) for part in value]
    return change(value) if key in _ONE else value


def is_place(reference: str) -> bool:
    """Whether a ``$ref`` leads to where a schema may stand: what stands elsewhere nobody has looked at."""
    fragment = unquote(reference.partition("#")[2])
    if not fragment.startswith("/"):
        return True  # the whole, or an anchor
    steps = fragment.split("/")[1:]
    while steps:
        key, *steps = steps
        if steps and (key in _MAP or (key in _LIST and steps[0].isdecimal())):
            del steps[0]
        elif key not in _ONE:
            return False
    return True


def places_of(text: str, keywords: Collection[str]) -> list[str]:
    """Where a schema has one of ``keywords``, e.g. ``$.properties.age.not``; the first few places."""
    schemas = walk(msgspec.json.decode(text), "$")
    places = [f"{place}.{keyword}" for place, one in schemas for keyword in keywords if keyword in one]
    return sorted(places)[:3]
