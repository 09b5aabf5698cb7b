"""Holds messages against the schema that the SDK ships, by their ``type``."""

import json
from importlib import resources
from typing import Any, Literal

import jsonschema

SCHEMA: dict[str, Any] = json.loads((resources.files("streamengine_sdk") / "protocol.schema.json").read_text())
_VALIDATORS = {
    (side, name): jsonschema.Draft202012Validator(rules)
    for side, kinds in SCHEMA["$defs"].items()
    for name, rules in kinds.items()
}


def validate(side: Literal["client", "server"], message: str | dict[str, Any]) -> dict[str, Any]:
    """``side`` said ``message``, a frame or its parsed JSON; it is returned. Raises `jsonschema.ValidationError`."""
    fields: dict[str, Any] = json.loads(message) if isinstance(message, str) else message
    _VALIDATORS[side, fields["type"]].validate(fields)
    if fields["type"] == "batch":
        for event in fields["events"]:
            validate(side, event)
    return fields
