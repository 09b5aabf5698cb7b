"""Constrained answers compared: what a grammar adds to each token, and how many answers are instances of their schema.

Validity is jsonschema's verdict with formats, on answers that ended by themselves; those that ``max_tokens`` cut are
counted apart. The schemas are of the kinds that people send, and some that no grammar can enforce: an engine may refuse
these, or answer anyhow.
"""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jsonschema

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


ENDLESS = {"type": "array", "items": record(name=TEXT, count=WHOLE), "minItems": 200}
"""Longer than what is generated, so that all engines write equally many tokens."""

SCHEMAS: dict[str, Any] = {
    "record": record(name={**TEXT, "maxLength": 20}, age={**WHOLE, "minimum": 0, "maximum": 150}),
    "open object": {"type": "object", "properties": {"age": WHOLE, "name": {**TEXT, "maxLength": 9}}},
    "enum": record(kind={"enum": ["cat", "dog", 7, None]}, sure={"type": "boolean"}),
    "nested": record(address=record(street={**TEXT, "maxLength": 20}, zip={**TEXT, "pattern": "^[0-9]{5}$"})),
    "list": {"type": "array", "items": {**WHOLE, "multipleOf": 5}, "minItems": 2, "maxItems": 6},
    "tuple": {"type": "array", "prefixItems": [WHOLE, {"type": "boolean"}], "items": False, "minItems": 2},
    "bounds": record(share={"type": "number", "exclusiveMinimum": 0, "maximum": 1}, big={**WHOLE, "minimum": 1000}),
    "pattern": record(code={**TEXT, "pattern": "^[A-Z]{2}-\\d{3,5}$"}, word={**TEXT, "pattern": "^\\w{2,8}$"}),
    "dates": record(day={**TEXT, "format": "date"}, at={**TEXT, "format": "time"}),
    "formats": record(id={**TEXT, "format": "uuid"}, ip={**TEXT, "format": "ipv4"}),
    "union": record(pet={"anyOf": [record(kind={"const": "cat"}, lives=WHOLE), record(kind={"const": "dog"})]}),
    "one of": {"oneOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, n=WHOLE)]},
    "nullable": record(a={"type": ["integer", "null"]}, b={"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}),
    "map": {"type": "object", "additionalProperties": {**WHOLE, "minimum": 0, "maximum": 9}, "maxProperties": 3},
    "tree": {
        "$defs": {"N": record(v={**WHOLE, "maximum": 9}, c={"type": "array", "items": {"$ref": "#/$defs/N"}})},
        "$ref": "#/$defs/N",
    },
    "all of": {"allOf": [record(a=WHOLE), {"properties": {"a": {"minimum": 3, "maximum": 5}}}]},
    "unique": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
    "not": {**record(a={"type": ["string", "integer"], "not": {"const": 1}, "maximum": 3, "maxLength": 3})},
    "if": {**record(a={"enum": [1, 2]}, b={"enum": [1, 2]}), "if": {"properties": {"a": {"const": 1}}}, "then": False},
    "contains": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4, "contains": {"const": 2}},
}
SEEDS = 3
BATCHES = (1, 8)
TOKENS, MOST_TOKENS = 64, 256
ROUNDS = 3
PROMPT = "An example of a JSON document that keeps to the schema:\n"


class Asked(Protocol):
    """One engine's process."""

    name: str

    def question(self, question: dict[str, Any]) -> dict[str, Any]: ...


def compare(engines: Sequence[Asked], encode: Callable[[str], list[int]]) -> dict[str, Any]:
    """For each engine what a grammar adds to a step, and how its answers ended."""
    return {"overhead": _overhead(engines, encode(PROMPT)), "validity": _validity(engines, encode)}


def _overhead(engines: Sequence[Asked], ids: list[int]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for batch in BATCHES:
        seconds: dict[tuple[str, bool], list[float]] = {}
        forced = {}
        for turn in range(ROUNDS + 1):  # the first warms up
            for engine in engines:
                for guided in (False, True):
                    items = [{"ids": ids, "schema": ENDLESS if guided else None}] * batch
                    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "seed": turn, "ignore_eos": not guided}
                    told = engine.question({"items": items, "sampling": sampling})
                    assert all(one.get("tokens") == TOKENS for one in told["answers"]), (engine.name, told["answers"])
                    if turn:
                        seconds.setdefault((engine.name, guided), []).append(told["seconds"])
                        forced[engine.name] = sum(one.get("forced", 0) for one in told["answers"]) / batch
        for engine in engines:
            plain, guided_ms = (1e3 * statistics.median(seconds[engine.name, kind]) / TOKENS for kind in (False, True))
            table.setdefault(engine.name, {})[str(batch)] = {
                "plain_ms": round(plain, 2),
                "guided_ms": round(guided_ms, 2),
                "added_ms": round(guided_ms - plain, 2),
                "forced_tokens": round(forced[engine.name], 1),
            }
            print(f"{engine.name:14} batch {batch:2}  {table[engine.name][str(batch)]}", flush=True)
    return table


def _validity(engines: Sequence[Asked], encode: Callable[[str], list[int]]) -> dict[str, Any]:
    prompts = {name: encode(f"{json.dumps(schema)}\n{PROMPT}") for name, schema in SCHEMAS.items()}
    table = {}
    for engine in engines:
        ends: Counter[str] = Counter()
        wrong: Counter[str] = Counter()
        for seed in range(SEEDS):
            items = [{"ids": prompts[name], "schema": schema} for name, schema in SCHEMAS.items()]
            sampling = {"max_tokens": MOST_TOKENS, "temperature": 1.5, "seed": seed, "ignore_eos": False}
            for name, told in zip(
                SCHEMAS, engine.question({"items": items, "sampling": sampling})["answers"], strict=True
            ):
                ends[end := _end(SCHEMAS[name], told)] += 1
                if end == "invalid":
                    wrong[name] += 1
        ended = ends["valid"] + ends["invalid"]
        table[engine.name] = {
            **ends,
            "valid_percent": round(100 * ends["valid"] / max(1, ended), 1),
            "invalid_of": dict(wrong),
        }
        print(f"{engine.name:14} {table[engine.name]}", flush=True)
    return table


def _end(schema: Any, told: Mapping[str, Any]) -> str:
    if "refused" in told:
        return "refused"
    if told["finish"] != "stop":
        return "cut"
    # The checker of this draft: the one of all drafts reads `time` as draft 3 did.
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    checker = jsonschema.Draft202012Validator(schema, format_checker=formats)
    try:
        return "valid" if checker.is_valid(json.loads(told["text"])) else "invalid"
    except ValueError:
        return "invalid"
