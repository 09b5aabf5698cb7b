"""The shared cases: each schema compiles or is refused, each text is accepted or not, as written down."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamengine.errors import GrammarError
from streamengine.guided.grammar import Grammar
from streamengine.guided.matcher import Vocabulary, accepts
from streamengine.guided.schema import prepare

CASES = json.loads((Path(__file__).parents[2] / "golden" / "guided-cases.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_gives_what_is_expected(case: dict[str, Any], vocabulary: Vocabulary) -> None:
    assert verdict(case, vocabulary) == case["expect"].removesuffix("-by-policy")


def verdict(case: dict[str, Any], vocabulary: Vocabulary) -> str:
    try:
        matcher = vocabulary.compile(Grammar(kind="json_schema", text=prepare(case["schema"])))
    except GrammarError:
        return "refuse"
    texts = {case["text"], case.get("text_in_policy", case["text"])}
    return "accept" if any(accepts(vocabulary, matcher, text) for text in texts) else "reject"
