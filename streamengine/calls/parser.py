"""From a text in pieces to text and calls, each as soon as it is certain. Pure.

Joined, the pieces are the same wherever the text was cut. Of a call that is cut before its arguments nothing is told.
"""

import re
import secrets
from typing import Literal, NamedTuple

import msgspec

from streamengine.calls.format import NAME, CallFormat

_NAME = re.compile(NAME)
_BRACKET = re.compile(r'["{}]')
_QUOTE = re.compile(r'["\\]')


class CallHead(msgspec.Struct, frozen=True, kw_only=True):
    """Which call something belongs to, from 0; ``id`` and ``name`` are told once, with the first of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call; ``arguments`` are JSON, and whole in an answer that ended with ``tool_calls``."""

    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """Text for the reader, or of the arguments of ``call``. Never empty."""

    text: str
    call: CallHead | None = None


class CallParser:
    """Feed it the whole text of one answer in order, and `finish` it.

    A text that leaves ``format`` within a call, as one that no grammar watches over may, is plain text from there on.
    """

    def __init__(self, format: CallFormat) -> None:
        self._format = format
        self._state: Literal["text", "markup", "name", "arguments", "after", "end"] = "text"
        self._rest = ""
        """What is not certain yet."""
        self._expected = ""
        self._name = ""
        self._head: CallHead | None = None
        self._depth = 0
        self._quoted = False

    @property
    def holds(self) -> bool:
        """Text may come out of what is held, if no more comes in."""
        return self._state == "text" and bool(self._rest)

    @property
    def inside(self) -> bool:
        """The marker of a call has come."""
        return self._state not in ("text", "end")

    @property
    def whole(self) -> bool:
        """There are calls, and the text may end here."""
        return self._head is not None and self._state == "after" and self._rest == self._format.last

    def feed(self, text: str) -> list[Piece]:
        """What has become certain with ``text``."""
        self._rest += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """No more comes: what looked like the beginning of a call is text after all. Of an answer that was ``cut``
        nobody knows, and half a marker is nothing to read: then it is dropped."""
        if cut:
            return []
        held, self._rest = (self._rest, "") if self.holds else ("", self._rest)
        return [Piece(held)] if held else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take a part of what is held; False if it takes more to know what it is."""
        match self._state:
            case "text":
                return self._read_text(pieces)
            case "markup":
                return self._read_markup()
            case "name":
                return self._read_name()
            case "arguments":
                return self._read_arguments(pieces)
            case "after":
                return self._read_after()
        return self._say(len(self._rest), pieces)

    def _say(self, size: int, pieces: list[Piece], call: CallHead | None = None) -> bool:
        if size:
            pieces.append(Piece(self._rest[:size], call))
            self._rest = self._rest[size:]
        return bool(size)

    def _read_text(self, pieces: list[Piece]) -> bool:
        marker = self._format.marker
        if self._format.leads:
            if self._rest and not self._rest.startswith(marker):
                self._state = "end"
                return True
            at = 0 if self._rest else -1
        else:
            at = self._rest.find(marker)
        if at < 0:
            held = next((n for n in range(len(marker) - 1, 0, -1) if self._rest.endswith(marker[:n])), 0)
            self._say(len(self._rest) - held, pieces)
            return False
        self._say(at, pieces)
        self._rest = self._rest[len(marker) :]
        self._expect(self._format.first[len(marker) :])
        return True

    def _expect(self, markup: str) -> None:
        self._state, self._expected = "markup", markup

    def _read_markup(self) -> bool:
        """What stands before a name, or between it and the arguments."""
        if len(self._rest) < len(self._expected) and self._expected.startswith(self._rest):
            return False
        if not self._rest.startswith(self._expected):
            self._state = "end"
            return True
        self._rest = self._rest[len(self._expected) :]
        self._state = "arguments" if self._name else "name"
        return True

    def _read_name(self) -> bool:
        match = _NAME.match(self._rest)
        if not self._rest or (match is not None and match.end() == len(self._rest)):
            return False
        if match is None:
            self._state = "end"
            return True
        self._name, self._rest = match.group(), self._rest[match.end() :]
        self._expect(self._format.middle)
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        if self._name:
            if not self._rest.startswith("{"):
                self._state = "end" if self._rest else "arguments"
                return bool(self._rest)
            index = 0 if self._head is None else self._head.index + 1
            self._head = CallHead(index=index, id=f"call_{secrets.token_hex(12)}", name=self._name)
            self._name = ""
        size = self._arguments_in(self._rest)
        self._say(size, pieces, self._head)
        if self._depth == 0:
            self._state = "after"
            return True
        return False

    def _arguments_in(self, text: str) -> int:
        """How much of ``text`` belongs to the object that is open. What a backslash may escape comes with it."""
        at = 0
        while match := (_QUOTE if self._quoted else _BRACKET).search(text, at):
            letter, at = match.group(), match.end()
            if letter == "\\":
                if at == len(text):
                    return at - 1
                at += 1
            elif letter == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if letter == "{" else -1
                if self._depth == 0:
                    return at
        return len(text)

    def _read_after(self) -> bool:
        """The end of the calls, or what leads on to the next. One may be the beginning of the other."""
        if self._format.between and self._rest.startswith(self._format.between):
            self._rest = self._rest[len(self._format.between) :]
            self._state = "name"
            return True
        if any(way.startswith(self._rest) for way in (self._format.between, self._format.last)):
            return False
        if self._rest.startswith(self._format.last):
            self._rest = self._rest[len(self._format.last) :]
        self._state = "end"
        return True
