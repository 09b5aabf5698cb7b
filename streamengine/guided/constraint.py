"""See `streamengine.guided.grammar.Constraint`."""

from streamengine.guided.closing import Steering
from streamengine.guided.matcher import Matcher


class GrammarConstraint:
    """``steering`` is there where the answer is to be closed."""

    def __init__(self, matcher: Matcher, steering: Steering | None = None) -> None:
        self.matcher = matcher
        self._steering = steering

    @property
    def error(self) -> str:
        return self.matcher.error

    def fork(self) -> "GrammarConstraint":
        return GrammarConstraint(self.matcher.copy(), self._steering and self._steering.fork())

    def take(self, token: int) -> bool:
        return self.matcher.advance(token) and self.matcher.stopped

    def trim(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        return drafts[: self.matcher.valid(drafts)] if drafts else drafts

    def forced(self) -> list[int]:
        return self.matcher.forced()

    def end(self, taken: int, left: int) -> tuple[int, list[int]] | None:
        return None if self._steering is None else self._steering.check(self.matcher, taken, left)
