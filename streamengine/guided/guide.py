"""What the core has of guided decoding: grammars in the making, and bitmasks for its steps.

The vocabulary is built when the core has nothing to do, or else with the first grammar: that holds the interpreter's
lock for a third of a second, which would be a gap in every stream.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Timer
from typing import cast

from compiled.step import Masks, ModelSpec
from streamengine.errors import GrammarError, RequestError, UnsupportedFeature
from streamengine.guided.closing import Closer, Steering
from streamengine.guided.compiler import GrammarCompiler
from streamengine.guided.constraint import GrammarConstraint
from streamengine.guided.grammar import Constraint, Grammar
from streamengine.guided.masks import MaskMaker
from streamengine.guided.matcher import Matcher, Vocabulary
from streamengine.guided.trial import Trial

REST_S = 1.0
"""How long a core must have had nothing to do before it uses the time."""

MOST_TO_CLOSE = 4096
"""Tokens of the longest shortest answer."""


class Guide:
    """Gives constraints for grammars, and bitmasks for steps. ``load`` makes the vocabulary.

    Its threads are the compiler's and the mask maker's, and a trial may have processes; `close` ends them.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._without: str | None = None
        """Why there is none: reading it again for every grammar would cost as much as reading it."""
        self._masks: MaskMaker | None = None
        self._closer: Closer | None = None
        self._rested = False
        self._trial = Trial()
        self._compiler = GrammarCompiler(self.compile)
        self.start = self._compiler.start
        self.cancel = self._compiler.cancel
        self.wait = self._compiler.wait
        self.statistics = self._compiler.statistics

    def done(self, now: float) -> list[tuple[int, GrammarConstraint | RequestError]]:
        """See `GrammarCompiler.done`."""
        return [
            (key, self._constraint(outcome) if isinstance(outcome, Matcher) else outcome)
            for key, outcome in self._compiler.done(now)
        ]

    def _constraint(self, matcher: Matcher) -> GrammarConstraint:
        if matcher.ending is None:
            return GrammarConstraint(matcher)
        assert self._closer is not None, "it has found the shortest answer"
        return GrammarConstraint(matcher, Steering(self._closer, matcher.ending))

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of ``grammar``, now. Raises RequestError."""
        self._trial.check(grammar)
        vocabulary = self._ready()
        with self._lock:
            if grammar.close and self._closer is None:
                self._closer = Closer(vocabulary)
        matcher = vocabulary.compile(grammar)
        if grammar.close and self._closer is not None:
            ending = self._closer.shortest(matcher, MOST_TO_CLOSE)
            if ending is None:
                raise GrammarError(f"close_document: no answer of at most {MOST_TO_CLOSE} tokens was found")
            matcher.ending = ending
        return matcher

    def _ready(self) -> Vocabulary:
        with self._lock:
            if self._without is not None:
                raise UnsupportedFeature(self._without, param="response_format")
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._load()
                except UnsupportedFeature as error:
                    self._without = error.message
                    raise
                self._masks = MaskMaker(self._vocabulary)
            return self._vocabulary

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While there is nothing to do. In a thread that is not the process's own, others may have."""
        if self._rested or threading.current_thread() is not threading.main_thread():
            yield
            return
        timer = Timer(REST_S, self._prepare)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _prepare(self) -> None:
        self._rested = True
        with suppress(RequestError):  # who asks for a grammar is told
            self._ready()

    def mask(self, places: list[tuple[Constraint, int, tuple[int, ...]]], rows: int) -> Masks:
        """See `Scheduler`."""
        assert self._masks is not None, "a constraint without a vocabulary"
        return self._masks.start(
            [(cast(GrammarConstraint, constraint).matcher, row, drafts) for constraint, row, drafts in places], rows
        )

    def close(self) -> None:
        self._compiler.close()
        self._trial.close()
        if self._masks is not None:
            self._masks.close()


def load_vocabulary(model: ModelSpec) -> Vocabulary:
    """Raises UnsupportedFeature where the model's ``tokenizer.json`` is missing, or is none for the grammar engine."""
    try:
        text = (Path(model.folder) / "tokenizer.json").read_text(encoding="utf-8")
    except OSError as error:
        reason = f"a grammar needs the model's tokenizer.json: {error}"
        raise UnsupportedFeature(reason, param="response_format") from error
    try:
        return Vocabulary.of_model(text, model.vocab_size, model.eos_token_ids)
    except ValueError as error:  # its words are not made of bytes, for one
        reason = f"no grammar can be kept with this model's vocabulary: {error}"
        raise UnsupportedFeature(reason, param="response_format") from error
