"""Grammars in the making: who waits for which, and for how many."""

import threading

import pytest

from streamengine.errors import GrammarError, Overloaded
from streamengine.guided.compiler import COMPILE_S, MAX_WAITING, THREADS, GrammarCompiler
from streamengine.guided.grammar import Grammar
from streamengine.guided.matcher import Matcher, Vocabulary


class Held:
    """A compiler that compiles nothing before `release`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.count = 0
        self.begun, self.released = threading.Event(), threading.Event()
        self._vocabulary = vocabulary
        self.compiler = GrammarCompiler(self._compile)

    def _compile(self, grammar: Grammar) -> Matcher:
        self.begun.set()
        assert self.released.wait(20)
        self.count += 1
        return self._vocabulary.compile(grammar)

    def release(self) -> None:
        self.released.set()
        while self.compiler.pending:
            self.compiler.wait(20)
            self.compiler.done(0.0)


def word(number: int) -> Grammar:
    return Grammar(kind="regex", text=f"a{number}")


def test_as_many_as_like_may_wait_for_one_grammar(vocabulary: Vocabulary) -> None:
    held = Held(vocabulary)
    for key in range(10 * MAX_WAITING):
        held.compiler.start(key, word(1), "", 0.0)
    held.release()
    assert held.count == 1


def test_a_tenant_with_too_many_grammars_in_the_making_is_told_to_wait_and_no_other(vocabulary: Vocabulary) -> None:
    held = Held(vocabulary)
    for key in range(MAX_WAITING):
        held.compiler.start(key, word(key), "greedy", 0.0)
    with pytest.raises(Overloaded, match=str(MAX_WAITING)):
        held.compiler.start(1000, word(1000), "greedy", 0.0)
    held.compiler.start(1001, word(3), "greedy", 0.0)
    held.compiler.start(1002, word(1002), "modest", 0.0)
    held.release()
    assert held.count == MAX_WAITING + 1


def test_a_grammar_over_which_the_engine_fails_is_refused_alone(vocabulary: Vocabulary) -> None:
    class Panic(BaseException):
        """As those of Rust arrive."""

    def compile(grammar: Grammar) -> Matcher:
        if grammar == word(1):
            raise Panic
        return vocabulary.compile(grammar)

    compiler = GrammarCompiler(compile)
    outcomes: dict[int, object] = {}
    for key in (1, 2):
        compiler.start(key, word(key), "", 0.0)
    while compiler.pending:
        compiler.wait(20)
        outcomes |= dict(compiler.done(0.0))
    compiler.close()
    assert (type(outcomes[1]), type(outcomes[2])) == (GrammarError, Matcher)


def test_a_grammar_that_takes_too_long_is_refused(vocabulary: Vocabulary) -> None:
    held = Held(vocabulary)
    held.compiler.start(1, word(1), "", 0.0)
    assert held.compiler.done(COMPILE_S - 1) == []
    ((key, outcome),) = held.compiler.done(COMPILE_S)
    assert (key, isinstance(outcome, GrammarError)) == (1, True)
    held.release()


def test_what_nobody_waits_for_any_more_is_not_begun(vocabulary: Vocabulary) -> None:
    held = Held(vocabulary)
    for key in range(20):
        held.compiler.start(key, word(key), "", 0.0)
    assert all(held.compiler.cancel(key) for key in range(THREADS, 20))
    held.release()
    assert held.count <= 2 * THREADS  # those that had begun, and those that were about to


def test_a_compile_that_everybody_left_is_remembered(vocabulary: Vocabulary) -> None:
    held = Held(vocabulary)
    held.compiler.start(1, word(1), "", 0.0)
    assert held.begun.wait(20)
    assert held.compiler.cancel(1)
    held.compiler.start(2, word(2), "", 0.0)
    held.release()
    held.compiler.start(3, word(1), "", 0.0)
    held.release()
    assert held.count == 2
