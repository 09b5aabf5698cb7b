"""What ``strict: false`` costs: what of a schema is not enforced, and whether an answer keeps to it all the same."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
import msgspec

from streamengine.guided import judge
from streamengine.guided.grammar import Grammar
from streamengine.guided.trial import Trial

JUDGES = 2
JUDGE_S = 20.0
"""A judge limits its own time on a processor; this is for one that does not get any."""


def left_out(grammar: Grammar) -> tuple[str, ...]:
    """What the engine does not enforce of a lenient grammar, in its words. Takes as long as compiling does.

    Raises:
        GrammarError: it does not compile even so.
    """
    # Most fronts never need the grammar engine, and it takes a while to import.
    from streamengine.guided.matcher import Vocabulary

    with closing(Trial()) as trial:
        trial.check(grammar)
    return tuple(Vocabulary.of_bytes().compile(grammar).warnings)


class Judges:
    """Judge answers, a few at a time."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(JUDGES)

    async def judge(self, schema: str, text: str) -> bool | None:
        """Whether ``text`` is an instance of ``schema``; None if that cannot be told within bounds."""
        question = msgspec.json.encode([msgspec.Raw(schema.encode()), text])
        async with self._limiter:
            with anyio.move_on_after(JUDGE_S):
                program = [sys.executable, "-P", str(Path(judge.__file__))]
                told = await anyio.run_process(program, input=question, check=False, stderr=subprocess.DEVNULL)
                return {b"true": True, b"false": False}.get(told.stdout)
        return None
