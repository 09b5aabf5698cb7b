"""The values of a JSON document, told as each becomes complete, from a text that arrives in pieces. Pure.

``{"a": [1, {"b": "x"}]}`` gives ``/a/0``, ``/a/1/b``, ``/a/1``, ``/a`` and last the whole, whose path is empty. Each
character is looked at once, whatever the pieces are.
"""

import re
from typing import Any, NamedTuple

import msgspec

_BLANK = " \t\n\r"
_QUOTE = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[\s,\]}]")


MAX_DEPTH = 60
"""Values are told of documents that are nested no deeper. Those who read JSON may count levels, or recurse."""


class Value(NamedTuple):
    """``path`` is a JSON Pointer (RFC 6901)."""

    path: str
    value: Any


class _Open(NamedTuple):
    """A container that has begun; ``path`` leads to it."""

    path: str
    items: dict[str, Any] | list[Any]


class ValueTracker:
    """Feed it the whole text in order. What follows a complete document is ignored. Where the text is no JSON, too
    deep, or holds a number that Python has not, nothing is told from there on."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Up to here everything is read."""
        self._looked = 0
        """Of a string that is not complete: where to look on for its end."""
        self._open: list[_Open] = []
        self._key: str | None = None
        self._done = False

    def feed(self, text: str) -> list[Value]:
        """Values that ``text`` completes."""
        self._text = self._text[self._at :] + text
        self._looked -= self._at
        self._at = 0
        return self._read(last=False)

    def finish(self) -> list[Value]:
        """The text has ended: a number that nothing followed is complete too."""
        return self._read(last=True)

    def _read(self, *, last: bool) -> list[Value]:
        found: list[Value] = []
        try:
            self._read_into(found, last=last)
        except ValueError:
            self._done = True
        return found

    def _read_into(self, found: list[Value], *, last: bool) -> None:
        while not self._done and self._at < len(self._text):
            letter = self._text[self._at]
            if letter in _BLANK or letter in ",:":
                self._at += 1
            elif letter in "{[":
                if len(self._open) == MAX_DEPTH:
                    raise ValueError(f"nested deeper than {MAX_DEPTH}")
                self._open.append(_Open(self._path(), {} if letter == "{" else []))
                self._key = None
                self._at += 1
            elif letter in "}]":
                self._at += 1
                self._close(found)
            elif (end := self._end_of_scalar(letter, last=last)) is None:
                break
            else:
                scalar = msgspec.json.decode(self._text[self._at : end])
                self._at = end
                self._take(scalar, found)

    def _end_of_scalar(self, letter: str, *, last: bool) -> int | None:
        if letter != '"':
            match = _AFTER_SCALAR.search(self._text, self._at)
            return match.start() if match else len(self._text) if last else None
        start = max(self._looked, self._at + 1)
        while match := _QUOTE.search(self._text, start):
            if match.group() == '"':
                return match.end()
            start = match.end() + 1
        self._looked = start  # may lie behind the text: what a backslash escapes is yet to come
        return None

    def _take(self, scalar: Any, found: list[Value]) -> None:
        container = self._open[-1].items if self._open else None
        if isinstance(container, dict) and self._key is None:
            self._key = scalar
        else:
            self._put(Value(self._path(), scalar), found)

    def _close(self, found: list[Value]) -> None:
        if not self._open:
            raise ValueError("a bracket closes what was not opened")
        path, items = self._open.pop()
        self._put(Value(path, items), found)

    def _put(self, value: Value, found: list[Value]) -> None:
        found.append(value)
        if not self._open:
            self._done = True
            return
        path, items = self._open[-1]
        if isinstance(items, list):
            items.append(value.value)
            return
        # A container's own key went when it began: the last step of its path.
        key = value.path[len(path) + 1 :].replace("~1", "/").replace("~0", "~")
        items[key] = value.value
        self._key = None

    def _path(self) -> str:
        """Of the value that comes next."""
        if not self._open:
            return ""
        path, items = self._open[-1]
        if isinstance(items, list):
            return f"{path}/{len(items)}"
        return f"{path}/{(self._key or '').replace('~', '~0').replace('/', '~1')}"
