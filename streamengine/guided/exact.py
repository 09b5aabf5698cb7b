"""What a schema asks for that the grammar engine would keep only nearly. Pure."""

from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any

from streamengine.errors import GrammarError
from streamengine.guided.places import Schema, walk

MOST = 2**53 - 1
"""Either way: beyond it the engine rounds, as many do who read JSON, and then counts wrongly or without an end."""

_FACTOR_LIMIT = 2**32


def check_exact(schema: Schema) -> None:
    """Raises `GrammarError` with the place: a value that would be rounded, or a count of properties that the same
    property may fulfil twice."""
    factors: dict[Fraction, str] = {}
    for place, one in walk(schema, "$"):
        wanted = [*_numbers([one.get("const"), one.get("enum")]), *(_outer_bounds(one))]
        if far := next((value for value in wanted if abs(value) > MOST), None):
            raise GrammarError(f"{place} asks for {str(far)[:30]}, numbers beyond {MOST} cannot be kept exactly")
        required, least = one.get("required"), one.get("minProperties")
        known = len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > known + 1:
            raise GrammarError(f"minProperties above those required and one more cannot be enforced, at {place}")
        factor = one.get("multipleOf")
        if isinstance(factor, int | float) and not isinstance(factor, bool) and factor > 0:
            factors.setdefault(Fraction(str(factor)), place)
    _check_factors(factors)


def _numbers(value: Any) -> Iterator[float]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int | float):
            yield value


def _outer_bounds(schema: Schema) -> Iterator[float]:
    """Those that ask for numbers far out; the others ask for nothing that far."""
    for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        if isinstance(bound := schema.get(key), int | float) and bound * sign > 0:
            yield bound


def _check_factors(factors: dict[Fraction, str]) -> None:
    """The engine multiplies two of one number in 32 bits, without a look at what does not fit."""
    if len(factors) > 1:
        scale = lcm(*(factor.denominator for factor in factors))
        whole = [int(factor * scale) for factor in factors]
        if lcm(*whole) * max(whole) >= _FACTOR_LIMIT:
            places = ", ".join([*factors.values()][:3])
            raise GrammarError(f"multipleOf has values whose common multiples are too large, at {places}")
