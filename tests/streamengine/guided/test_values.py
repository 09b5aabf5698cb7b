"""Values are told as they become complete, however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine.guided.values import Value, ValueTracker

SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS = st.recursive(
    SCALARS | st.text(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


def told(*pieces: str) -> list[Value]:
    tracker = ValueTracker()
    return [value for piece in pieces for value in tracker.feed(piece)] + tracker.finish()


def all_values(document: Any, path: str = "") -> list[tuple[str, Any]]:
    children: list[tuple[str, Any]] = []
    if isinstance(document, list):
        children = [(str(i), child) for i, child in enumerate(document)]
    elif isinstance(document, dict):
        children = [(key.replace("~", "~0").replace("/", "~1"), child) for key, child in document.items()]
    return [one for key, child in children for one in all_values(child, f"{path}/{key}")] + [(path, document)]


def test_inner_values_come_before_what_holds_them() -> None:
    assert told('{"a": [1, {"b": "x"}]}') == [
        ("/a/0", 1),
        ("/a/1/b", "x"),
        ("/a/1", {"b": "x"}),
        ("/a", [1, {"b": "x"}]),
        ("", {"a": [1, {"b": "x"}]}),
    ]


def test_a_value_is_told_with_the_piece_that_completes_it() -> None:
    tracker = ValueTracker()
    assert tracker.feed('{"name": "To') == []
    assert tracker.feed('m", "age": 3') == [("/name", "Tom")]
    assert tracker.feed("7, ") == [("/age", 37)]


def test_a_number_that_nothing_follows_is_complete_at_the_end() -> None:
    tracker = ValueTracker()
    assert tracker.feed("12") == []
    assert tracker.finish() == [("", 12)]


@given(DOCUMENTS, st.data())
def test_every_value_is_told_once_however_the_text_is_cut(document: Any, data: st.DataObject) -> None:
    text = json.dumps(document, indent=data.draw(st.sampled_from([None, 2])), ensure_ascii=data.draw(st.booleans()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told(*pieces) == told(text) == all_values(document)


def test_a_long_string_in_many_pieces_is_read_once() -> None:
    pieces = ['"', *["ab\\", '"c'] * 20_000, '"']
    (value,) = told(*pieces)
    assert value == ("", 'ab"c' * 20_000)


@pytest.mark.parametrize("rest", ["]]", "nul]", "1e999]", '"\\ud800"]', "[" * 60 + "1" + "]" * 61])
def test_nothing_is_told_from_where_it_cannot_be(rest: str) -> None:
    assert told("[1, ", rest)[:1] == [("/0", 1)]
    assert ("", [1]) in told("[1, ", rest) or len(told("[1, ", rest)) == 1
    assert told("[1,", rest) == told("[1,", *rest)
