"""What cannot be compiled within bounds is refused, and nothing of it goes on."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from streamengine.errors import GrammarError
from streamengine.guided import trial as trials
from streamengine.guided.grammar import Grammar
from streamengine.guided.schema import prepare
from streamengine.guided.trial import Trial

ENDLESS = Grammar(
    kind="json_schema",
    text=prepare({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)], "type": "string"}),
)
SHORT = Grammar(kind="regex", text="a+")


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    monkeypatch.setattr(trials, "PATIENCE_S", 10.0)
    with closing(Trial()) as trial:
        yield trial


def test_a_grammar_whose_compile_does_not_end_is_refused_and_its_process_is_gone(trial: Trial) -> None:
    trial.check(SHORT)
    (worker,) = trial._idle
    with pytest.raises(GrammarError, match="cannot be compiled within"):
        trial.check(ENDLESS)
    assert worker.returncode is not None
    trial.check(SHORT)


def test_one_process_serves_one_grammar_after_the_other(trial: Trial) -> None:
    for length in range(1, 5):
        trial.check(Grammar(kind="regex", text=f"a{{{length}}}"))
    assert len(trial._idle) == 1


def test_running_answers_go_before_a_trial(trial: Trial) -> None:
    trial.check(SHORT)
    assert os.getpriority(os.PRIO_PROCESS, trial._idle[0].pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_what_is_wrong_with_a_grammar_is_not_for_a_trial_to_say(trial: Trial) -> None:
    trial.check(Grammar(kind="regex", text="("))


@pytest.mark.parametrize("schema", ['{"const":-9223372036854775807}', '{"type":"integer","multipleOf":2147483648}'])
def test_a_number_that_the_engine_cannot_count_harms_nobody_else(trial: Trial, schema: str) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled within"):
        trial.check(Grammar(kind="json_schema", text=schema))
    trial.check(SHORT)


def test_after_the_end_nothing_is_tried(trial: Trial) -> None:
    trial.check(SHORT)
    trial.close()
    with pytest.raises(GrammarError):
        trial.check(SHORT)
