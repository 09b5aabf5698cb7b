"""Whatever is drawn, an answer that ends is an instance of its schema."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from streamengine.errors import GrammarError
from streamengine.guided.grammar import Grammar
from streamengine.guided.matcher import Matcher, Vocabulary
from streamengine.guided.schema import prepare

CASES = json.loads((Path(__file__).parents[2] / "golden" / "guided-cases.json").read_text())["cases"]
MOST_TOKENS = 3000
CLOSERS = b'"]}'
NAMES = ("name", "age", "tags", "next", "x/y", "é", "a b")


def draw(vocabulary: Vocabulary, matcher: Matcher, source: random.Random) -> str | None:
    """A text of tokens drawn at random, a little in favour of those that close something; None if it does not end."""
    bitmask = np.zeros((1, vocabulary.words), np.int32)
    ends = set(vocabulary.tokenizer.eos_tokens)
    tokens: list[int] = []
    while not matcher.stopped:
        vocabulary.fill([(matcher, 0, ())], bitmask)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "no token is left"
        likely = [token for token in allowed if token in ends or (token < 256 and token in CLOSERS)]
        token = source.choice(likely if likely and source.random() < 0.3 else allowed)
        if token in ends:
            break
        assert matcher.advance(token), matcher.error
        tokens.append(token)
        if len(tokens) == MOST_TOKENS:
            return None
    return bytes(tokens).decode()


def schemas(source: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Schemas of the kinds that people write, nested at random."""
    for _ in range(count):
        yield _schema(source, 0)


def _schema(source: random.Random, depth: int) -> dict[str, Any]:
    low, high = sorted(source.sample(range(-50, 500), 2))
    size = sorted((source.randrange(4), source.randrange(1, 6)))
    simple: list[dict[str, Any]] = [
        {"type": "string", "minLength": size[0], "maxLength": size[1]},
        {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
        {"type": "string", "format": source.choice(["date", "uuid", "ipv4", "time"])},
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "number", "exclusiveMinimum": low, "maximum": high},
        {"type": "integer", "multipleOf": source.choice([3, 5, 7])},
        {"enum": source.sample(["a", "bb", 1, 2.5, None, True, ["x"], {"k": 1}], 3)},
        {"const": source.choice(["é\n", 0, {"deep": [1, None]}])},
        {"type": ["boolean", "null"]},
    ]
    if depth >= 3 or source.random() < 0.4:
        return source.choice(simple)
    kind = source.choice(["object", "object", "array", "tuple", "anyOf", "union", "ref"])
    if kind == "array":
        return {"type": "array", "items": _schema(source, depth + 1), "minItems": size[0], "maxItems": size[1]}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [_schema(source, depth + 1) for _ in range(2)], "items": False}
    if kind == "anyOf":
        return {"anyOf": [_schema(source, depth + 1) for _ in range(3)]}
    if kind == "union":
        branches = [_object(source, depth, {"kind": {"const": name}}) for name in ("cat", "dog")]
        return {"oneOf": branches}
    if kind == "ref":
        node = {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        }
        return {**node, "required": ["v", "next"], "additionalProperties": False} if depth == 0 else simple[0]
    return _object(source, depth, {})


def _object(source: random.Random, depth: int, first: dict[str, Any]) -> dict[str, Any]:
    names = source.sample(NAMES, source.randrange(1, 5))
    properties = {**first, **{name: _schema(source, depth + 1) for name in names}}
    required = [*first, *source.sample(names, source.randrange(len(names) + 1))]
    more: Any = source.choice([False, False, {"type": "integer"}])
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def check(schema: dict[str, Any], vocabulary: Vocabulary, seeds: int) -> int:
    """How many of ``seeds`` answers ended; all of those are valid."""
    matcher = vocabulary.compile(Grammar(kind="json_schema", text=prepare(schema)))
    texts = [draw(vocabulary, matcher.copy(), random.Random(seed)) for seed in range(seeds)]
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for text in filter(None, texts):
        validator.validate(json.loads(text))
    return sum(text is not None for text in texts)


def test_answers_to_the_shared_cases_are_valid(vocabulary: Vocabulary) -> None:
    tried = ended = 0
    for case in {json.dumps(case["schema"]): case for case in CASES}.values():
        try:
            ended += check(case["schema"], vocabulary, 3)
        except GrammarError:
            continue
        tried += 3
    assert tried > 200
    assert ended > 0.95 * tried


@pytest.mark.slow
def test_answers_to_generated_schemas_are_valid(vocabulary: Vocabulary) -> None:
    ended = sum(check(schema, vocabulary, 3) for schema in schemas(random.Random(7), 200))
    assert ended > 0.95 * 600
