"""A schema that says the same as a client's, or a little more, in words that the grammar engine keeps exactly. Pure.

What says nothing is dropped, because the engine refuses every keyword that it does not enforce; a keyword that says
something is never dropped. Where the engine reads something wider than those who check answers, it is narrowed.
"""

import re
from collections.abc import Callable, Collection
from typing import Any, TypeGuard

import msgspec

from streamengine.errors import GrammarError
from streamengine.guided.exact import MOST
from streamengine.guided.patterns import portable
from streamengine.guided.places import Schema, mapped, walk

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are enforced; any other is an annotation, as the standard has it."""

_DAY = (
    "^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_YEAR = "^([1-9]|0[1-9]|00[1-9]|000[1-9])"
_SECOND = r"([0-9]{2}:[0-9]{2}:[0-5]|23:59:60(\.[0-9]+)?[zZ]$)"
_FORMATS = {"date": (_DAY, _YEAR), "date-time": (_DAY, _YEAR, f"^.{{11}}{_SECOND}"), "time": (f"^{_SECOND}",)}
"""Format → what the engine does not know of it. A year 0 is valid, but most languages have no such date, so an answer
never says it; a leap second comes at the end of a day."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "not": (False,),
}
"""Keyword → values with which it says nothing."""

_WORDS = frozenset({"enum", "const", "type", "title", "description"})
"""Of a schema for some words."""
MAX_NAMES = 400
MAX_NAMED_BYTES = 128 * 1024
"""Of properties that ``propertyNames`` becomes."""

_CLAMPS: dict[str, Callable[[float], float]] = {
    "minimum": lambda bound: max(bound, -MOST),
    "exclusiveMinimum": lambda bound: max(bound, -MOST),
    "maximum": lambda bound: min(bound, MOST),
    "exclusiveMaximum": lambda bound: min(bound, MOST),
}
"""Bounds → as far as the engine counts."""

_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u|\x7f")
_PRINTABLE_ESCAPES = 'nrbtf\\"'


def normalise(schema: Schema, *, strict: bool) -> Schema:
    """A copy in the order of its keys. Not ``strict``: who checks an answer is asked, so nothing is narrowed.

    Raises:
        GrammarError: a pattern that is not read alike everywhere.
    """
    normal: Schema = _Normal(strict).change(schema)
    bounds = [bound for _, one in walk(normal, "$") for key in _CLAMPS if _is_number(bound := one.get(key))]
    for _, one in walk(normal, "$"):
        _name_properties(one, normal)
        if strict:
            _move_bounds(one, bounds)
    return normal


def engine_options(text: str) -> Schema:
    """How the engine is to write strings of this normal schema.

    It tells names that are taken from others by their bytes. So where a schema names properties and allows others,
    nothing may be written as ``\\u0061`` that could be written plainly; nor then can control characters.

    Raises:
        GrammarError: some are asked for.
    """
    named = {"properties", "patternProperties", "required"}
    schemas = walk(msgspec.json.decode(text), "$")
    if not any(one.keys() & named and one.get("additionalProperties") is not False for _, one in schemas):
        return {}
    if _CONTROL.search(text):
        raise GrammarError("control characters cannot be kept where further properties are allowed")
    return {"json_allowed_escapes": _PRINTABLE_ESCAPES}


class _Normal:
    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def change(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        normal = {
            key: mapped(key, value, self.change) for key, value in schema.items() if _says_something(key, value, schema)
        }
        if "oneOf" in normal:
            # The engine proves that branches exclude each other only where it merges them with a sibling.
            normal.setdefault("anyOf", [{}])
        if self._strict:
            _narrow(normal)
        return normal


def _narrow(normal: Schema) -> None:
    if isinstance(normal.get("pattern"), str):
        normal["pattern"] = portable(normal["pattern"])
    if isinstance(normal.get("patternProperties"), dict):
        normal["patternProperties"] = _narrow_keys(normal)
    if patterns := _FORMATS.get(normal.get("format", "")):
        normal["allOf"] = [*normal.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
    for key, clamp in _CLAMPS.items():
        if _is_number(bound := normal.get(key)):
            normal[key] = clamp(bound)


def _move_bounds(one: Schema, bounds: Collection[float]) -> None:
    """The engine takes a whole number in that is to be left out, where another bound is less than 1 farther from 0.
    The nearest number of 16 digits that is not left out says nearly the same."""
    for end, away in (("inimum", 1), ("aximum", -1)):
        left_out, limit = f"exclusiveM{end}", f"m{end}"
        whole = one.get(limit) if one.get(left_out) is True else one.get(left_out)  # it is a flag in draft 4
        if not _is_number(whole) or whole % 1 or whole * away < 0:
            continue
        if any(0 < (bound - whole) * away < 1 for bound in bounds):
            del one[left_out]
            places = 16 - len(str(abs(int(whole))))
            nearest = round(whole + away * 10.0**-places, places)
            one[limit] = away * max(away * nearest, away * one.get(limit, nearest))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _narrow_keys(normal: Schema) -> Schema:
    """Where other keys may be anything, whoever takes one for a match must find what the pattern asks for; where there
    are no others, a key must be a match to all."""
    others = normal.get("additionalProperties", True)
    narrow, widest = ([portable(key, widest=widest) for key in normal["patternProperties"]] for widest in (False, True))
    alike = narrow == [pattern.replace(r"\n?$", "$") for pattern in widest]
    is_open = others is True or others == {}
    if not (alike or is_open or (others is False and "properties" not in normal)):
        raise GrammarError("patternProperties has a key that not all validators read alike, beside other properties")
    keys = dict(zip(widest if is_open else narrow, normal["patternProperties"].values(), strict=True))
    if len(keys) < len(narrow):
        raise GrammarError("patternProperties has two patterns that mean the same")
    return keys


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
    words = [word for word in words if word == names.get("const", word)]
    value = one.get("additionalProperties", True)
    small = len(words) <= MAX_NAMES and len(words) * len(msgspec.json.encode(value)) <= MAX_NAMED_BYTES
    if (
        words
        and small
        and all(isinstance(word, str) for word in words)
        and not one.keys() & {"properties", "patternProperties"}
    ):
        del one["propertyNames"]
        one |= {"properties": dict.fromkeys(words, value), "additionalProperties": False}


def _says_something(key: str, value: Any, schema: dict[str, Any]) -> bool:
    match key:
        case "x-guidance":  # options of the engine, which are ours to set
            return False
        case "format":
            return isinstance(value, str) and value in FORMATS
        case "then" | "else":
            return "if" in schema
        case "if":
            return "then" in schema or "else" in schema
        case "minContains" | "maxContains" if "contains" not in schema:
            return False
    # `0 == False` in Python; in JSON it is not.
    return not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(key, ()))
