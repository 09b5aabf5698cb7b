"""What a client may say in a regular expression or in Lark, where the grammar engine would take it for something else
than the client does. Pure. What is broken otherwise, the engine says.
"""

import re

import msgspec

from streamengine.errors import GrammarError
from streamengine.guided.schema import check_repeats

_REPEAT = r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})"
_PATTERN = re.compile(rf"(?s)\\.|(\\)|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|{_REPEAT}\??({_REPEAT})?|.")
_LARK = re.compile(
    r'//[^\n]*|("x-guidance")|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(<[^>\n]*>)|^[^\S\n]*[?!]?\w+\[[^\]\n]*(temperature)',
    re.MULTILINE,
)


def check_pattern(pattern: str) -> None:
    """Raises GrammarError for a count that is too high, and for what the engine reads in a way of its own: a repeated
    repeat (a mistake to some, possessive to others), and a backslash at the end, which it drops."""
    check_repeats(pattern)
    for match in _PATTERN.finditer(pattern):
        if match.group(1):
            raise GrammarError("a pattern ends with a backslash")
        if match.group(2):
            raise GrammarError(f"multiple repeat at position {match.start(2)}")


def check_lark(text: str) -> None:
    """Raises GrammarError for what the engine takes and an answer cannot keep.

    A token that is named in place of text may be one that ends the answer before the grammar does, a rule's temperature
    is not kept, and ``x-guidance`` would loosen a schema unsaid.
    """
    for match in _LARK.finditer(text):
        options, token, temperature = match.groups()
        line = text.count("\n", 0, match.end()) + 1
        if token:
            raise GrammarError(f"line {line} names the token {token[:40]}; an answer's grammar is one of its text")
        if temperature or options:
            raise GrammarError(f"line {line} has {temperature or 'x-guidance'}, which is not for a grammar to set")


def choice_grammar(choices: list[str]) -> str:
    """One of ``choices``, in Lark. As a terminal, which is one automaton: of rules the engine follows a few thousand at
    most, and only says so in the middle of an answer."""
    literals = (msgspec.json.encode(choice).decode().replace("\x7f", "\\x7f") for choice in dict.fromkeys(choices))
    return f"start: CHOICE\nCHOICE: {' | '.join(literals)}"
