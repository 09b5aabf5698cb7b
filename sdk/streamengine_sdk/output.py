"""``output=``: what an answer shall be, as a JSON schema on the way out and as a value on the way in."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from streamengine_sdk.errors import OutputInvalid
from streamengine_sdk.events import Result


@dataclass(frozen=True)
class Output:
    """Args:
    name: of the schema, for the server's messages.
    schema: JSON Schema.
    parse: text to value; raises `ValueError`.
    """

    name: str
    schema: Mapping[str, Any]
    parse: Callable[[str], Any]

    @classmethod
    def of(cls, wanted: Any) -> "Output":
        """A schema as mapping, a ``Literal[...]``, or a pydantic model class, which is not imported here.
        Raises `TypeError`."""
        if isinstance(wanted, Mapping):
            return cls("output", dict(wanted), json.loads)
        if get_origin(wanted) is Literal:
            choices = list(get_args(wanted))
            return cls("choice", {"enum": choices}, lambda text: choices[choices.index(json.loads(text))])
        if isinstance(wanted, type) and hasattr(wanted, "model_json_schema"):
            return cls(wanted.__name__, wanted.model_json_schema(), wanted.model_validate_json)  # type: ignore[attr-defined]
        raise TypeError(f"output must be a JSON schema, a Literal or a pydantic model class, not {wanted!r}")

    @property
    def response_format(self) -> dict[str, Any]:
        schema = {"name": self.name, "schema": self.schema, "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def parsed(self, result: Result) -> Result:
        """With ``parsed`` filled in. Raises `OutputInvalid`."""
        try:
            return replace(result, parsed=self.parse(result.text))
        except ValueError as error:
            text = f"the answer is not the {self.name} that was asked for: {error}"
            raise OutputInvalid(text, partial=result) from error
