"""What a request wants its answer to be, as one frozen value that the link can carry."""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from compiled.step import Masks

Kind = Literal["json_schema", "regex", "lark", "tools"]

WHITESPACE = r"(\x20|\n\x20{0,40}|\n\t{0,10})"
"""Between JSON's tokens: what `json.dumps` writes, compact or indented. Unbounded blank space would let a model
write nothing else until its tokens are spent."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` is a normalised JSON Schema, a regular expression, or a grammar in Lark's syntax, which that
    of ``tools`` is as well (see `streamengine.guided.tools`).

    With ``lenient`` what the engine cannot enforce in a schema is left out, with warnings: only where it was
    asked for. With ``close`` an answer is completed before its tokens are spent. Equal grammars compile to the same
    matcher.
    """

    kind: Kind
    text: str
    lenient: bool = False
    close: bool = False


class Constraint(Protocol):
    """How a grammar bears on one answer: where the answer stands in it. Moved on with every token that is taken."""

    @property
    def error(self) -> str:
        """What is wrong; empty while all is well. After an error nothing else holds."""
        ...

    def fork(self) -> "Constraint":
        """Another answer at the same place."""
        ...

    def take(self, token: int) -> bool:
        """Move on by ``token``, which is none that ends the answer by itself. True: the answer is complete."""
        ...

    def trim(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Those guesses at the beginning that the grammar allows."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model thinks."""
        ...

    def end(self, taken: int, left: int) -> tuple[int, list[int]] | None:
        """After ``taken`` tokens, with ``left`` more allowed: None while the answer may go on; else how many of those
        to take back, and the tokens that then complete it. Only a grammar that is to be closed ever asks for that."""
        ...


MakeMasks = Callable[[list[tuple[Constraint, int, tuple[int, ...]]], int], Masks]
"""Begins the bitmask of a step: from its constraints, each with its first row and the guesses that have the rows
behind that, and the number of rows."""
