"""``output=``: what an answer shall be, as a JSON schema on the way out and as a value on the way in."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from streamengine_sdk.errors import OutputInvalid
from streamengine_sdk.events import Result


@dataclass(frozen=True)
class Output:
    """Args:
    name: for messages.
    response_format: as it is sent.
    parse: text to value; raises `ValueError`.
    is_json: the answer is, so that its values can be told one by one.
    """

    name: str
    response_format: dict[str, Any]
    parse: Callable[[str], Any]
    is_json: bool = True

    @classmethod
    def of(cls, wanted: Any) -> "Output":
        """A schema as mapping, a ``Literal[...]``, or a pydantic model class, which is not imported here.
        Raises `TypeError`."""
        if isinstance(wanted, Mapping):
            return cls._of_schema("output", wanted, json.loads)
        if get_origin(wanted) is Literal:
            return cls._of_choices(list(get_args(wanted)))
        if isinstance(wanted, type) and hasattr(wanted, "model_json_schema"):
            return cls._of_schema(wanted.__name__, wanted.model_json_schema(), wanted.model_validate_json)  # type: ignore[attr-defined]
        raise TypeError(f"output must be a JSON schema, a Literal or a pydantic model class, not {wanted!r}")

    @classmethod
    def _of_choices(cls, choices: list[Any]) -> "Output":
        """Members of an enumeration go out by their values and come back as members."""
        values = [choice.value if isinstance(choice, Enum) else choice for choice in choices]
        for choice, value in zip(choices, values, strict=True):
            if not isinstance(value, str | int | None):  # also true and false, which Python counts as integers
                raise TypeError(f"output cannot be {choice!r}: JSON has no such value")
        if all(isinstance(value, str) for value in values):
            format = {"type": "choice", "choice": values}
            return cls("choice", format, lambda text: choices[values.index(text)], is_json=False)
        return cls._of_schema("choice", {"enum": values}, lambda text: choices[_place(values, text)])

    @classmethod
    def _of_schema(cls, name: str, schema: Mapping[str, Any], parse: Callable[[str], Any]) -> "Output":
        named = {"name": name, "schema": dict(schema), "strict": True}
        return cls(name, {"type": "json_schema", "json_schema": named}, parse)

    def parsed(self, result: Result) -> Result:
        """With ``parsed`` filled in. Raises `OutputInvalid`."""
        try:
            return replace(result, parsed=self.parse(result.text))
        except ValueError as error:
            text = f"the answer is not the {self.name} that was asked for: {error}"
            raise OutputInvalid(text, partial=result) from error


def _place(values: list[Any], text: str) -> int:
    """Of the one that is written so: as values ``1`` and ``True`` are equal."""
    return list(map(json.dumps, values)).index(json.dumps(json.loads(text)))
