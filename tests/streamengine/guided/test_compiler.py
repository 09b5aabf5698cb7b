"""Grammars in the making: what is shared, what is bounded, and what is left of those who went away."""

import threading
from collections.abc import Iterator

import pytest

from streamengine.errors import GrammarError, Overloaded
from streamengine.guided.compiler import COMPILE_S, MAX_WAITING, THREADS, GrammarCompiler
from streamengine.guided.grammar import Grammar
from streamengine.guided.matcher import Matcher, Vocabulary

PATIENCE_S = 20


def word(number: int) -> Grammar:
    return Grammar(kind="regex", text=f"a{{{number}}}")


class Held:
    """Compiles when it is let, and knows what it was asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.asked: list[Grammar] = []
        self.begun = threading.Event()
        self.open = threading.Event()
        self._vocabulary = vocabulary

    def compile(self, grammar: Grammar) -> Matcher:
        self.asked.append(grammar)
        self.begun.set()
        assert self.open.wait(PATIENCE_S)
        return self._vocabulary.compile(grammar)


@pytest.fixture
def held(vocabulary: Vocabulary) -> Held:
    return Held(vocabulary)


@pytest.fixture
def compiler(held: Held) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(held.compile)
    yield compiler
    held.open.set()
    compiler.close()


def all_done(compiler: GrammarCompiler, count: int) -> dict[int, object]:
    done: dict[int, object] = {}
    while len(done) < count:
        compiler.wait(PATIENCE_S)
        done |= dict(compiler.done(0.0))
    return done


def test_those_who_ask_for_one_grammar_wait_for_one_compile(compiler: GrammarCompiler, held: Held) -> None:
    for key in range(3):
        compiler.start(key, word(1), "", 0.0)
    held.open.set()
    outcomes = all_done(compiler, 3)
    assert len(held.asked) == 1
    assert len({id(outcome) for outcome in outcomes.values()}) == 3


def test_one_tenant_waits_for_so_many_grammars_and_another_for_its_own(compiler: GrammarCompiler) -> None:
    for key in range(MAX_WAITING):
        compiler.start(key, word(1 + key), "a", 0.0)
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} grammars"):
        compiler.start(1000, word(1000), "a", 0.0)
    compiler.start(1001, word(1000), "b", 0.0)


def test_what_nobody_waits_for_any_more_is_not_begun(compiler: GrammarCompiler, held: Held) -> None:
    for key in range(20):
        compiler.start(key, word(1 + key), "", 0.0)
    assert all(compiler.cancel(key) for key in range(THREADS, 20))
    held.open.set()
    all_done(compiler, THREADS)
    compiler.start(99, word(99), "", 0.0)
    all_done(compiler, 1)
    assert len(held.asked) <= 2 * THREADS + 1  # those that had begun, and the last


def test_a_compile_that_everybody_left_is_remembered_and_leaves_nothing(compiler: GrammarCompiler, held: Held) -> None:
    compiler.start(1, word(1), "", 0.0)
    assert held.begun.wait(PATIENCE_S)
    assert compiler.cancel(1)
    held.open.set()
    compiler.start(2, word(2), "", 0.0)
    all_done(compiler, 1)
    compiler.start(3, word(1), "", 0.0)
    all_done(compiler, 1)
    assert held.asked == [word(1), word(2)]


def test_a_compile_that_takes_too_long_ends_the_wait(compiler: GrammarCompiler) -> None:
    compiler.start(1, word(1), "", 0.0)
    assert compiler.done(COMPILE_S - 1) == []
    ((key, outcome),) = compiler.done(COMPILE_S)
    assert key == 1
    assert isinstance(outcome, GrammarError)
