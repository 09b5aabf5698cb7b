"""See `streamengine.guided.grammar.Constraint`."""

from streamengine.guided.matcher import Matcher


class GrammarConstraint:
    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str:
        return self.matcher.error

    def fork(self) -> "GrammarConstraint":
        return GrammarConstraint(self.matcher.copy())

    def take(self, token: int) -> bool:
        return self.matcher.advance(token) and self.matcher.stopped

    def trim(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        return drafts[: self.matcher.valid(drafts)] if drafts else drafts

    def forced(self) -> list[int]:
        return self.matcher.forced()
