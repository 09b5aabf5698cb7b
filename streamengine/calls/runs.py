"""Which texts of a log are arguments of which call. Pure."""

from bisect import bisect_right
from collections.abc import Sequence

from streamengine.calls.parser import CallHead, ToolCall


class Runs:
    """Positions at which the texts of entries change their kind: few, in order. Text comes first."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._calls: list[CallHead | None] = []

    def add(self, start: int, call: CallHead | None) -> None:
        """From entry ``start`` on (from 0), arguments of ``call``, or text."""
        self._starts.append(start)
        self._calls.append(call)

    def end(self, position: int) -> int | None:
        """Where the run ends that the entry at ``position`` is in; None in the last."""
        place = bisect_right(self._starts, position)
        return self._starts[place] if place < len(self._starts) else None

    def call(self, position: int) -> CallHead | None:
        """Of the entry at ``position``; with its id and name where it is the first."""
        place = bisect_right(self._starts, position) - 1
        call = self._calls[place] if place >= 0 else None
        return call if call is None or self._starts[place] == position else CallHead(index=call.index)

    def text(self, texts: Sequence[str]) -> str:
        """What is no call."""
        return "".join(part for part, call in self._split(texts) if call is None)

    def tool_calls(self, texts: Sequence[str]) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(id=call.id or "", name=call.name or "", arguments=part)
            for part, call in self._split(texts)
            if call is not None and part
        )

    def _split(self, texts: Sequence[str]) -> list[tuple[str, CallHead | None]]:
        starts, ends = (0, *self._starts), (*self._starts, len(texts))
        calls = (None, *self._calls)
        return [("".join(texts[start:end]), call) for start, end, call in zip(starts, ends, calls, strict=True)]
