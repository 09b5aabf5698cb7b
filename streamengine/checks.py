"""Values as a user gives them, made exact: the one place that knows what is a number, a switch or a choice.

Exact, because they travel: msgpack knows int, float and str, but none of their subclasses, numpy's among them.
A struct says its ranges in its annotations, as `msgspec.Meta`, which msgspec itself only looks at on decoding.
"""

import operator
from functools import cache
from math import inf
from numbers import Integral, Real
from reprlib import Repr
from typing import Any

import msgspec
from msgspec import inspect, structs

from streamengine.errors import InvalidRequest, StreamEngineError

_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80

Fault = type[StreamEngineError]


def shown(value: object) -> str:
    """``value`` inside a message: short, and never a second error."""
    try:
        return _REPR.repr(value)
    except Exception:  # foreign code, or a number with too many digits to print
        return f"this {type(value).__name__}"


def exact_integer(name: str, value: object, low: int, high: int, fault: Fault = InvalidRequest) -> int:
    """``value`` as an int within ``low`` to ``high``, for any kind of integer but a bool."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise fault(f"{name} must be an integer, not {shown(value)}", param=name)
        value = operator.index(value)
    if not low <= value <= high:
        raise fault(f"{name} must be {low} to {high}, not {shown(value)}", param=name)
    return value


def exact_number(
    name: str, value: object, low: float, high: float, *, above: bool = False, fault: Fault = InvalidRequest
) -> float:
    """``value`` as a float within ``low`` (or, with ``above``, more) to ``high``, for any real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise fault(f"{name} must be a number, not {shown(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = inf
    # Put so that NaN, which compares false with everything, is refused as well.
    if not low <= number <= high or (above and number == low):
        wanted = f"{'above ' if above else ''}{low:g} to {high:g}"
        raise fault(f"{name} must be {wanted}, not {shown(value)}", param=name)
    return number


def check_text(text: object, name: str, fault: Fault = InvalidRequest) -> str:
    """``text`` itself, which can be encoded: half of a surrogate pair cannot."""
    if not isinstance(text, str):
        raise fault(f"{name} must be a string, not {'nothing' if text is None else type(text).__name__}", param=name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X}, at character {error.start}"
        raise fault(f"{name} holds a lone surrogate, {where}", param=name) from None
    return text if type(text) is str else str.__str__(text)


MANY = 2**31 - 1
"""Upper limit of counts that have no reason for one."""


def settle(struct: msgspec.Struct, fault: Fault) -> None:
    """Make every number, switch, choice and string of ``struct`` exactly what its annotation says.

    Raises:
        ``fault``, by the name of the field.
    """
    for field, kind, optional in _plan(type(struct)):
        value = getattr(struct, field)
        if optional and value is None:
            continue
        exact = _exact(field, value, kind, fault)
        if exact is not value:
            structs.force_setattr(struct, field, exact)


def _exact(name: str, value: Any, kind: inspect.Type, fault: Fault) -> Any:
    match kind:
        case inspect.IntType(ge=low, le=high):
            assert low is not None and high is not None, f"{name} has no range"
            return exact_integer(name, value, low, high, fault)
        case inspect.FloatType(gt=above, ge=least, le=most):
            bound = least if above is None else above
            assert bound is not None and most is not None, f"{name} has no range"
            return exact_number(name, value, bound, most, above=above is not None, fault=fault)
        case inspect.BoolType() if not isinstance(value, bool):
            raise fault(f"{name} must be true or false, not {shown(value)}", param=name)
        case inspect.LiteralType(values=choices) if not isinstance(value, str) or value not in choices:
            raise fault(f"{name} must be one of {', '.join(map(str, choices))}, not {shown(value)}", param=name)
        case inspect.LiteralType() | inspect.StrType():
            return _exact_text(name, value, kind, fault)
        case inspect.VarTupleType():
            return _exact_items(name, value, kind, fault)
    return value


def _exact_items(name: str, values: object, kind: inspect.VarTupleType, fault: Fault) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list):
        raise fault(f"{name} must be a list, not {shown(values)}", param=name)
    if kind.max_length is not None and len(values) > kind.max_length:
        raise fault(f"{name} holds {len(values)} entries, at most {kind.max_length}", param=name)
    return tuple(_exact(name, value, kind.item_type, fault) for value in values)


def _exact_text(name: str, value: object, kind: inspect.Type, fault: Fault) -> str:
    text = check_text(value, name, fault)
    least, most = getattr(kind, "min_length", None) or 0, getattr(kind, "max_length", None)
    if len(text) < least or (most is not None and len(text) > most):
        raise fault(f"{name} must have {least} to {most} characters, not {len(text)}", param=name)
    return text


@cache
def _plan(struct: type[msgspec.Struct]) -> list[tuple[str, inspect.Type, bool]]:
    """Field, what it is, whether it may be None: of each field that is looked at here."""
    plan = []
    for field in inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        present = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
        if len(present) == 1:
            plan.append((field.name, present[0], len(present) < len(kinds)))
    return plan
