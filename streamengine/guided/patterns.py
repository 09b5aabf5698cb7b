"""Patterns that mean the same to whoever checks an answer. Pure.

A schema's patterns are ECMAScript's; validators read them as their own language does: what `\\w`, `\\s` or a dot match
differs between JavaScript, Python and Rust, and so does what may stand within brackets. So a pattern is written anew
for the grammar engine, which reads Rust's: narrowed to what all of them match, or refused.
"""

import re
from string import ascii_letters
from typing import NoReturn

from streamengine.errors import GrammarError

_DIGIT = "0-9", r"\p{Nd}"
_WORD = "0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}\p{Alphabetic}\x{200c}\x{200d}"
_SPACE = r" \t\n\r\f\v", r"\p{White_Space}\x{1c}-\x{1f}\x{feff}"
_CLASSES = {
    letter: sets
    for lower, (least, most) in {"d": _DIGIT, "w": _WORD, "s": _SPACE}.items()
    for letter, sets in ((lower, (least, most)), (lower.upper(), (f"[^{most}]", f"[^{least}]")))
}
"""Letter of an escape → what it matches to all, and what it matches to anyone. Both stand within brackets."""

_DOT = r"[^\n\r\x{2028}\x{2029}]"
_SAME = frozenset("bBkpPc123456789")
"""Escapes that mean one thing, if the engine knows them."""

_ESCAPE = re.compile(r"u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|0(?![0-9])()|[pP]\{[^}]*\}|(?s:.)")
_GROUP = re.compile(r"\(\?([a-zA-Z]*(?:-[a-zA-Z]+)?)([:)])")
_REPEAT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")


def portable(pattern: str, *, widest: bool = False) -> str:
    """``pattern`` in the engine's dialect: what it matches to all, or to anyone if ``widest``.

    What is broken is left to the engine.

    Raises:
        GrammarError: it holds what is read too differently, which is named.
    """
    reader, parts = _Reader(pattern, widest), []
    while not reader.done:
        parts.append(reader.read())
    return "".join(parts)


class _Reader:
    def __init__(self, pattern: str, widest: bool) -> None:
        self._pattern = pattern
        self._widest = widest
        self._at = 0
        self._dot = "(?s:.)" if widest else _DOT

    @property
    def done(self) -> bool:
        return self._at >= len(self._pattern)

    def read(self) -> str:
        """The next part."""
        letter = self._pattern[self._at]
        if match := _REPEAT.match(self._pattern, self._at):
            self._at = match.end()
            if _REPEAT.match(self._pattern, self._at):
                self._refuse("a repeated repeat")
            return match.group()
        if match := _GROUP.match(self._pattern, self._at):
            return self._flags(match)
        self._at += 1
        match letter:
            case "\\":
                return self._escape()
            case "[":
                return self._brackets()
            case ".":
                return self._dot
            case "$" if self._widest:  # Python looks past a line feed
                return r"\n?$"
        return letter

    def _flags(self, match: re.Match[str]) -> str:
        everywhere = match.start() == 0 and match.group(2) == ")"
        if set(match.group(1)) - set("ims" if everywhere else "im"):
            self._refuse(match.group())
        if "s" in match.group(1):
            self._dot = "(?s:.)"
        self._at = match.end()
        return match.group()

    def _escape(self) -> str:
        letter = self._pattern[self._at : self._at + 1]
        if letter in _CLASSES:
            self._at += 1
            return f"[{_CLASSES[letter][self._widest]}]"
        return self._character()

    def _character(self) -> str:
        """Behind a backslash."""
        match = _ESCAPE.match(self._pattern, self._at)
        if match is None:
            self._refuse("a backslash at its end")
        self._at = match.end()
        digits = next((group for group in match.groups() if group is not None), None)
        if digits is not None:
            code = int(digits or "0", 16)
            if 0xD800 <= code < 0xE000:
                self._refuse(f"half a character, \\{match.group()}")
            return f"\\x{{{code:x}}}"
        text = match.group()
        if text in "tnrfv" or text[0] in _SAME:
            return f"\\{text}"
        if text in ascii_letters:
            self._refuse(f"\\{text}")
        return _literal(text)

    def _brackets(self) -> str:
        parts = ["["]
        negated = self._pattern.startswith("^", self._at)
        if negated:
            parts.append("^")
            self._at += 1
        if self._pattern.startswith("]", self._at):
            self._refuse("[^]" if negated else "[]")
        while self._at < len(self._pattern):
            if self._pattern[self._at] == "]":
                self._at += 1
                return "".join([*parts, "]"])
            parts.append(self._member(negated))
        return "".join(parts)

    def _member(self, negated: bool) -> str:
        """A character, a class, or a range."""
        first, single = self._one(negated)
        if not self._pattern.startswith("-", self._at) or self._pattern.startswith("-]", self._at):
            return first
        self._at += 1
        if self._at >= len(self._pattern):
            return first
        last, ends = self._one(negated)
        return f"{first}-{last}" if single and ends else f"{first}{_literal('-')}{last}"

    def _one(self, negated: bool) -> tuple[str, bool]:
        """The next of a bracket, and whether it is a single character."""
        letter = self._pattern[self._at]
        self._at += 1
        if letter != "\\":
            return _literal(letter), True
        escaped = self._pattern[self._at : self._at + 1]
        if escaped in _CLASSES:
            self._at += 1
            return _CLASSES[escaped][negated != self._widest], False
        if escaped == "b":
            self._at += 1
            return _literal("\b"), True
        return self._character(), escaped not in ("p", "P")

    def _refuse(self, what: str) -> NoReturn:
        raise GrammarError(f"a pattern has {what[:24]}, which not all validators read alike")


def _literal(character: str) -> str:
    """It means itself, wherever it stands."""
    return character if character.isalnum() or character > "\x7f" else f"\\x{{{ord(character):x}}}"
