"""The grammar engine, behind the few calls that another engine could answer as well. Only importer of llguidance.

A `Matcher` is where one answer stands in its grammar. Tokens that end an answer are never fed to it: whether
it may end, or must, is what it says itself.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from streamengine.errors import GrammarError
from streamengine.guided import tools
from streamengine.guided.grammar import WHITESPACE, Grammar
from streamengine.guided.normal import engine_options
from streamengine.guided.places import places_of

LIMITS: dict[str, Any] = {"initial_lexer_fuel": 5_000_000, "max_items_in_row": 5_000, "verbose_errors": False}
"""Wider than the engine's own: 400 optional properties are 400 ways on at once."""

_BROKEN = frozenset({"ParserTooComplex", "LexerTooComplex", "InternalError"})

BURST_S, TOKEN_S = 0.25, 0.005
"""CPU seconds that an answer's grammar may take at once, and for each token in the long run, while whole steps wait.
Those of a usual one take a fiftieth of that."""

_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r'"([^"]+)"')

Bitmask = NDArray[np.int32]
Place = tuple["Matcher", int, tuple[int, ...]]
"""A matcher, its first row in the bitmask, and the guesses that have the rows behind it, valid ones all."""


class _Added(msgspec.Struct):
    content: str


class _TokenizerJson(msgspec.Struct):
    """The rest, which is megabytes, is not made into objects."""

    added_tokens: list[_Added] | None = None


class Vocabulary:
    """The tokens that grammars are compiled against; ``added`` are those that are not text."""

    def __init__(self, tokenizer: LLTokenizer, added: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._added = tuple(added)
        self.words = -(-tokenizer.vocab_size // 32)
        self._end = np.zeros(32 * self.words, np.uint8)
        self._end[tokenizer.eos_tokens or [0]] = 1
        self._end = np.packbits(self._end, bitorder="little").view(np.int32)
        self._no_end = ~self._end
        self._executor = LLExecutor(num_threads=1)

    @classmethod
    def of_model(cls, tokenizer_json: str, size: int, eos_token_ids: Sequence[int]) -> "Vocabulary":
        """A model's, ``size`` logits wide. Its ends are the ids that end an answer which may end."""
        added = msgspec.json.decode(tokenizer_json, type=_TokenizerJson).added_tokens or ()
        tokenizer = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=list(eos_token_ids) or None)
        return cls(tokenizer, [token.content for token in added])

    @classmethod
    def of_bytes(cls) -> "Vocabulary":
        """One token a byte: whatever any model could write."""
        return cls(LLTokenizer("byte"))

    def compile(self, grammar: Grammar) -> "Matcher":
        """A matcher at the beginning of ``grammar``. Takes as long as it takes, without the interpreter's lock.

        Raises:
            GrammarError: it is broken, too large, or asks for what cannot be enforced; with the engine's reason.
        """
        self._check_added(grammar)
        matcher = LLMatcher(self.tokenizer, _source(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            # An endless chain of references shows only now.
            matcher.compute_bitmask()
        if not matcher.is_error():
            return Matcher(matcher)
        if grammar.kind == "tools":
            self._blame(grammar)
        raise GrammarError(_reason(matcher, grammar))

    def _check_added(self, grammar: Grammar) -> None:
        """Where text that must come spells an added token, the engine offers that token and then refuses it."""
        match grammar.kind:
            case "tools":
                texts = [text for _, text in tools.schemas_of(grammar)]
            case "lark":
                texts = _LITERAL.findall(grammar.text)
            case _:
                texts = [grammar.text]
        for token in self._added:
            if any(token in text for text in texts):
                what = "tools" if grammar.kind == "tools" else "response_format"
                raise GrammarError(f"it spells {token!r}, a token of the model's that is not text", param=what)

    def _blame(self, grammar: Grammar) -> None:
        """The first tool whose schema is refused by itself."""
        for place, text in tools.schemas_of(grammar):
            try:
                self.compile(Grammar(kind="json_schema", text=text))
            except GrammarError as error:
                raise GrammarError(f"{place}: {error.message}", param=place) from error

    def fill(self, places: Sequence[Place], bitmask: Bitmask) -> None:
        """Set the rows of ``bitmask`` ``[rows, words]``: a bit is set where the token may come next. Each row has one.

        A grammar that has become too complex shows in `Matcher.error`; its row then holds an end that is none.
        """
        rows, words = bitmask.shape
        at, size = bitmask.ctypes.data, words * 4
        now = time.thread_time()
        for matcher, row, drafts in places:
            if drafts:
                place = [(matcher.engine, row, list(drafts))]
                self._executor.unsafe_compute_mask_ptr_with_draft_token(place, at, size, rows)
            else:
                matcher.engine.unsafe_compute_mask_ptr(at + row * size, size)
            now = matcher.took(now)
        # The engine that fails while it computes a mask offers an end, and may not even say that it has failed.
        more: NDArray[np.bool_] = np.logical_or.reduce(bitmask & self._no_end, axis=1)
        if not more.all():
            for matcher, row, drafts in places:
                for i in (~more[row : row + 1 + len(drafts)]).nonzero()[0]:
                    self._check(matcher, drafts[:i], bitmask[row + i])

    def _check(self, matcher: "Matcher", drafts: tuple[int, ...], bits: Bitmask) -> None:
        """Whether an answer may really end where the engine offers nothing else."""
        there = matcher.copy()
        if matcher.error or not (all(map(there.advance, drafts)) and (there.accepting or there.stopped)):
            matcher.fail("it has become too complex")
            bits[:] = self._end


class Origin:
    """What copies of one matcher share: the engine's lexer, whose failure in one of them breaks all."""

    failure = ""


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, engine: LLMatcher, ending: Sequence[int] | None = None, origin: Origin | None = None) -> None:
        self.engine = engine
        self._origin = origin or Origin()
        self.ending = ending
        """Of a grammar that is to be closed: the shortest answer that was found."""
        self._debt_s = 0.0

    def copy(self) -> "Matcher":
        return Matcher(self.engine.deep_copy(), self.ending, self._origin)

    def fail(self, reason: str) -> None:
        """Nothing that was made of this grammar is to be trusted from now on."""
        self._origin.failure = self._origin.failure or reason

    def took(self, since: float) -> float:
        """A call of the engine that began at ``since``, by this thread's clock, which does not count what others take.
        All others wait for it. Returns the time now."""
        now = time.thread_time()
        self._debt_s += now - since
        if self._debt_s > BURST_S:
            self.fail(f"its tokens take more than {TOKEN_S} s each, and {BURST_S} s together")
        return now

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.took(started)

    def advance(self, token: int) -> bool:
        """Take ``token``; False if the grammar does not allow it (`error` says why), for good."""
        self._debt_s = max(0.0, self._debt_s - TOKEN_S)
        with self.timed():
            return bool(self.engine.consume_token(token))

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may come next, one after the other."""
        with self.timed():
            return int(self.engine.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about."""
        with self.timed():
            return list(self.engine.compute_ff_tokens())

    def rollback(self, count: int) -> None:
        assert self.engine.rollback(count), self.engine.get_error()

    @property
    def accepting(self) -> bool:
        """Whether the answer could end here."""
        return bool(self.engine.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return bool(self.engine.is_stopped()) and not self.engine.is_error()

    @property
    def error(self) -> str:
        """Empty while all is well."""
        if self._origin.failure or not self.engine.is_error():
            return self._origin.failure
        reason = _reason(self.engine)
        if self.engine.stop_reason() in _BROKEN:  # else it was the token
            self.fail(reason)
        return reason

    @property
    def warnings(self) -> list[str]:
        """What a lenient compile left out."""
        return list(self.engine.get_grammar_warnings())


def accepts(vocabulary: Vocabulary, matcher: Matcher, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    whole = matcher.copy()
    for token in vocabulary.tokenizer.tokenize_str(text):
        if whole.stopped or not whole.advance(token):
            return False
    return whole.accepting or whole.stopped


def parts_of(grammar: Grammar) -> list[str]:
    """What the engine compiles of it, in its words, as far as it needs no model: markup of tools names tokens that only
    that has; their schemas do not."""
    if grammar.kind != "tools":
        return [_source(grammar)]
    return [_source(Grammar(kind="json_schema", text=text)) for _, text in tools.schemas_of(grammar)]


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            options: Any = {
                "lenient": grammar.lenient,
                "whitespace_pattern": WHITESPACE,
                **({} if grammar.lenient else engine_options(grammar.text)),
            }
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark" | "tools":
            return LLMatcher.grammar_from_lark(grammar.text)


def _reason(engine: LLMatcher, grammar: Grammar | None = None) -> str:
    """One line of the engine's report; its words for an endless reference say nothing to a client."""
    lines = [line for line in engine.get_error().splitlines() if line.strip() and not line.startswith(" ")]
    if not lines:
        return "the grammar engine failed"
    if "NoExtension" in lines[0]:
        return "the grammar has no end: nothing satisfies it"
    if grammar is not None and grammar.kind == "json_schema":
        refused, why = _NAME.findall(keys.group(1)) if (keys := _UNSUPPORTED.search(lines[0])) else [], ""
        if lines[0].startswith("oneOf constraints"):
            refused, why = ["oneOf"], " where its branches do not provably exclude each other"
        if refused:
            places = places_of(grammar.text, refused) or ["the end of a reference"]
            return f"{', '.join(refused)} cannot be enforced{why}, at {', '.join(places)}"
    error = next((line for line in lines if line.startswith("error:")), "")
    return f"{lines[0]} {error}".strip()
