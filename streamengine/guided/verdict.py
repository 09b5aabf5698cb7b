"""Whether a schema can be kept, and whether a text would be a whole answer to it.

Needs no model: a grammar speaks of bytes, and every vocabulary is made of them.
"""

from typing import Any

import msgspec

from streamengine.errors import RequestError
from streamengine.guided.formats import read_format
from streamengine.guided.matcher import Vocabulary, accepts
from streamengine.guided.trial import Trial


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``accepts`` is None where there was no text or no grammar."""

    compiles: bool
    error: str | None = None
    accepts: bool | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of ``--jsonl``."""

    schema: Any
    text: str | None = None


def judge(question: Question, vocabulary: Vocabulary, trial: Trial) -> Verdict:
    """What an engine would say to this schema in a ``response_format``, and to this text as an answer."""
    wanted = {"type": "json_schema", "json_schema": {"schema": question.schema}}
    try:
        grammar = read_format(wanted)
        assert grammar is not None, "a schema is a grammar"
        trial.check(grammar)
        matcher = vocabulary.compile(grammar)
    except RequestError as error:
        return Verdict(compiles=False, error=error.message)
    return Verdict(
        compiles=True, accepts=None if question.text is None else accepts(vocabulary, matcher, question.text)
    )


def judge_line(line: bytes, vocabulary: Vocabulary, trial: Trial) -> Verdict:
    """See `judge`; a line that is no question is refused like a schema."""
    try:
        question = msgspec.json.decode(line, type=Question)
    except (msgspec.DecodeError, RecursionError) as error:
        return Verdict(compiles=False, error=f"not a line of {{schema, text}}: {error}")
    return judge(question, vocabulary, trial)
