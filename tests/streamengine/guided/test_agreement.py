"""Whatever a grammar accepts, who checks it afterwards accepts as well; and what nobody checks alike is refused."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from itertools import product
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from streamengine.errors import GrammarError
from streamengine.guided.matcher import Vocabulary
from streamengine.guided.normal import FORMATS
from streamengine.guided.schema import prepare
from streamengine.guided.trial import Trial
from streamengine.guided.verdict import Question, judge

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
KINDS = {"k": {"const": "a"}}, {"k": {"const": "b"}}

TRIED: list[tuple[Any, list[str], list[str]]] = [
    # a name is the same name however it is spelt
    (A, ['{"a": 1}', '{"é": "x"}', '{"b\\n": "\\t"}'], ['{"a": 1, "\\u0061": "x"}', '{"\\u0061": "x"}']),
    ({"type": "object", "properties": {"a": False}}, ["{}", '{"b": 1}'], ['{"\\u0061": 1}']),
    ({"type": "object", "patternProperties": {"a": {"type": "integer"}}}, ['{"b": "x"}'], ['{"b\\u0061": "x"}']),
    ({**A, "additionalProperties": {"type": "null"}}, ['{"b": null}'], ['{"\\u0061": null}']),
    ({"required": ["a"], "minProperties": 2, "type": "object"}, ['{"a":1,"b":2}'], ['{"a":1,"\\u0061":2}', '{"a":1}']),
    ({"allOf": [A, {"required": ["b"]}]}, ['{"a":1,"b":2}'], ['{"b":1,"\\u0061":"x"}']),
    ({**A, "additionalProperties": False}, ['{"a":1}'], ['{"\\u0061":1}', '{"b":1}']),
    # numbers: as they are written in decimal, whatever 64 bits make of them
    ({"type": "number", "multipleOf": 0.01}, ["0.07", "19.99", "-4.35", "3"], ["0.001", "1.115"]),
    ({"type": "number", "exclusiveMaximum": 0.3}, ["0.29", "-5", "0.2"], ["0.3", "0.30", "0.31"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001"], ["0", "0.0", "-0", "0.6"]),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-0.0", "-0.51"]),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.25}, ["3.1"], ["3", "3.0", "3.25", "4"]),
    ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.1}]}, ["0.1"], ["0"]),
    (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 0,
            "exclusiveMinimum": True,
            "maximum": 0.5,
        },
        ["0.5"],
        ["0"],
    ),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", "-9007199254740991"], [f"{2**63}", "0.5"]),
    ({"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, ["12", "0", "-24"], ["4", "6", "8"]),
    ({"const": 1e-7}, ["0.0000001"], ["0.0000002", "0"]),
    ({"enum": [1.5, "1.5", None, 0, [], {}]}, ["1.5", '"1.5"', "null", "0", "[]", "{}"], ["1", "false", '""', "[0]"]),
    ({"type": "boolean", "enum": [True, 1, 0]}, ["true"], ["1", "0", "false"]),
    # patterns match to everybody, whatever language checks
    ({"type": "string", "pattern": "^\\d$"}, ['"1"'], ['"٣"', '"a"']),
    ({"type": "string", "pattern": "^\\D$"}, ['"a"', '"é"'], ['"٣"', '"1"']),
    ({"type": "string", "pattern": "^[^\\D]$"}, ['"1"'], ['"٣"', '"a"']),
    ({"type": "string", "pattern": "^\\W$"}, ['"-"', '"€"'], ['"é"', '"a"', '"²"']),
    ({"type": "string", "pattern": "^[\\W_]$"}, ['"_"'], ['"é"']),
    ({"type": "string", "pattern": "^\\S$"}, ['"é"'], ['"\u00a0"', '"\\u001c"', '"\ufeff"', '" "']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"💩"', '"\\t"'], ['"\\n"', '"\\r"', '"\u2028"', '""']),
    ({"type": "string", "pattern": "^a$"}, ['"a"'], ['"a\\n"', '"ab"']),
    ({"type": "string", "pattern": "^[a-z&&[^b]]$"}, ['"a]"', '"&]"'], ['"a"', '"b"']),
    ({"type": "string", "pattern": "^[[a]$"}, ['"["', '"a"'], ['"b"']),
    ({"type": "string", "pattern": "^[a~~c\\b-]$"}, ['"~"', '"-"', '"\\b"'], ['"b"']),
    ({"type": "string", "pattern": "^\\<\\/\\u0041\\x42$"}, ['"</AB"'], ['"AB"']),
    ({"type": "string", "pattern": "(?s)^.$"}, ['"\\n"'], ['""']),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ['"💩💩"', '"\\n\\t"'], ['"💩"', '"abc"', '"👨\u200d👩"']),
    ({"patternProperties": {"^\\d$": {"type": "integer"}}}, ['{"3": 1}', '{"٣": 1}', '{"x": "y"}'], ['{"٣": "x"}']),
    ({"patternProperties": {"a$": {"type": "integer"}}}, ['{"b": "x"}'], ['{"a\\n": "x"}']),
    (
        {"type": "object", "patternProperties": {"^\\D$": {}}, "additionalProperties": False},
        ['{"x": 1}'],
        ['{"٣": 1}', '{"3": 1}'],
    ),
    # dates that there are
    (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"2023-12-31"', '"2023-04-30"'],
        ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"0000-01-01"', '"2023-04-31"'],
    ),
    (
        {"type": "string", "format": "date-time"},
        ['"2024-02-29T12:00:00.5+01:00"', '"2016-12-31T23:59:60Z"'],
        ['"2023-02-29T12:00:00Z"', '"2023-01-01T12:00:60Z"', '"2023-01-01T23:59:60+01:00"'],
    ),
    ({"type": "string", "format": "time"}, ['"23:59:60Z"', '"01:02:03-04:00"'], ['"12:00:60Z"', '"24:00:00Z"']),
    ({"type": ["string", "null"], "format": "date"}, ["null", '"2024-02-29"'], ['"2023-02-29"', "5"]),
    # drafts, references, unions
    (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        ["4", "3.5"],
        ["3", "3.0", "2"],
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}], "additionalItems": False},
        ["[]", "[1]"],
        ["[1, 2]", "[2]"],
    ),
    ({"$ref": "#/%24defs/a~1b", "$defs": {"a/b": {"type": "integer"}}, "minimum": 3}, ["3"], ["2", '"x"']),
    ({"$ref": "#/$defs/a/items", "$defs": {"a": {"items": {"enum": [1]}}}}, ["1"], ["2"]),
    (
        {"oneOf": [{"type": "object", "properties": kind, "required": ["k"]} for kind in KINDS]},
        ['{"k": "a"}', '{"k": "b", "x": 1}'],
        ['{"k": "c"}', "{}", '{"k": "a", "\\u006b": "c"}'],
    ),
    (
        {
            "$defs": {
                "x": {"$id": "http://a/b", "$defs": {"q": {"$anchor": "f", "type": "integer"}}},
                "y": {"$anchor": "f", "type": "string"},
            },
            "$ref": "#f",
        },
        ['"a"'],
        ["1"],
    ),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 1}, ["[1]"], ["[]", "[1, 1]"]),
    ({"$schema": DRAFT_7, "type": "object", "dependencies": {}}, ["{}"], ["1"]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"], "const": "a"}}, ['{"a": 1}', "{}"], ['{"b": 1}']),
    ({"properties": {"$ref": {"const": 1}, "enum": {"const": 2}}}, ['{"$ref": 1, "enum": 2}'], ['{"enum": 1}']),
]

REFUSED: list[tuple[Any, str]] = [
    ({"const": -(2**63) + 1}, "cannot be kept exactly"),
    ({"properties": {"a": {"enum": ["x", {"n": [1e300]}]}}}, r"\$\.properties\.a asks for 1e\+300"),
    ({"type": "integer", "minimum": 2**53}, "cannot be kept exactly"),
    ({"type": "number", "exclusiveMaximum": -1e18}, "cannot be kept exactly"),
    ({"allOf": [{"multipleOf": 70_000}, {"multipleOf": 70_001}]}, "common multiples"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 2}, "drafts 4 to 2020-12"),
    ({"properties": {"a": {"$schema": "http://json-schema.org/draft-04/schema#"}}}, "differs from that of the whole"),
    ({"$ref": "#/default", "default": {"minProperties": 2}}, "where no schema stands"),
    ({"$ref": "#/$defs/a/enum/0", "$defs": {"a": {"enum": [{}]}}}, "where no schema stands"),
    ({"$ref": "#/$defs", "$defs": {}}, "where no schema stands"),
    *(
        ({"$ref": name, "$defs": {"a": {key: own, "type": "integer"}, "b": {key: own}}}, r"\$defs\..*ambiguous")
        for key, own, name in (("$anchor", "f", "#f"), ("$id", "http://a/b", "http://a/b"))
    ),
    *(
        ({"pattern": pattern}, "read alike")
        for pattern in ("\\Aa\\z", "\\a", "[]a]", "[^]", "a++", "(?x) a", "a\\", "\\ud83d")
    ),
    ({"type": "object", "patternProperties": {"\\d": {}}, "additionalProperties": {"type": "null"}}, "read alike"),
    ({"patternProperties": {"\\d": {}, "[0-9]": {}}, "additionalProperties": False}, "mean the same"),
    ({"properties": {"a": {"const": "\u0001"}}}, "control characters"),
    (
        {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        r"oneOf .* exclude each other, at \$\.properties\.a\.oneOf$",
    ),
]

NO_DRAFTS: tuple[Any, ...] = (5, None, [], "", "http://[", "https://example.com/mine")
REFUSED += [({"$schema": draft}, "drafts 4 to 2020-12") for draft in NO_DRAFTS]

MORE = ("$schema", "$id", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions", "x-guidance", "then")
JUNK: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, "", "http://[", "(", [], [[]], [{}], ["a", 1], {}, {"a": []})


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    with closing(Trial()) as trial:
        yield trial


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of Python, about brackets that others read as sets
@pytest.mark.parametrize(("schema", "good", "bad"), TRIED, ids=lambda value: json.dumps(value)[:60])
def test_the_grammar_and_a_validator_agree(trial: Trial, schema: Any, good: list[str], bad: list[str]) -> None:
    vocabulary = Vocabulary.of_bytes()
    verdicts = {text: judge(Question(schema=schema, text=text), vocabulary, trial) for text in [*good, *bad]}
    assert {text: (verdict.error, verdict.accepts) for text, verdict in verdicts.items()} == {
        **dict.fromkeys(good, (None, True)),
        **dict.fromkeys(bad, (None, False)),
    }
    assert [text for text in good if not is_instance(schema, text)] == []


def is_instance(schema: Any, text: str) -> bool:
    """In decimal, as a schema means its numbers."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    formats = jsonschema.FormatChecker(FORMATS & kind.FORMAT_CHECKER.checkers.keys() - {"date-time", "time"})
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return bool(kind(exact, format_checker=formats).is_valid(json.loads(text, parse_float=Decimal)))


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_kept_for_everybody_is_refused_with_the_reason(trial: Trial, schema: Any, reason: str) -> None:
    verdict = judge(Question(schema=schema), Vocabulary.of_bytes(), trial)
    assert verdict.error is not None
    assert re.search(reason, verdict.error)


def test_what_is_judged_afterwards_is_not_narrowed() -> None:
    assert prepare({"pattern": "\\W", "minProperties": 2}, lenient=True) == '{"pattern":"\\\\W","minProperties":2}'


@pytest.mark.parametrize("draft", [DRAFT_7, "https://json-schema.org/draft/2020-12/schema"])
@pytest.mark.parametrize("lenient", [False, True])
def test_whatever_stands_at_a_keyword_is_made_ready_or_refused(draft: str, lenient: bool) -> None:
    """Also where the draft has no such keyword, so that nobody has checked what stands there."""
    keywords = sorted({*jsonschema.Draft202012Validator.VALIDATORS, *jsonschema.Draft4Validator.VALIDATORS, *MORE})
    refused = 0
    for keyword, place, junk in product(keywords, ("not", "additionalItems", "$defs", "contentSchema"), JUNK):
        one = {keyword: junk}
        for schema in ({"$schema": draft, **one}, {"$schema": draft, place: {"a": one} if place == "$defs" else one}):
            try:
                prepare(schema, lenient=lenient)
            except GrammarError:
                refused += 1
    assert refused
