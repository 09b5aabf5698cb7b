"""From what a user asks to what the core is told: tokens, and every number within the model's limits.

Refuses here, before the core sees anything, whatever a request can be refused for by itself. Never holds
up the event loop: what takes longer than a few milliseconds runs in a worker thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from msgspec import structs

from compiled.step import KVSpec, ModelSpec, Sampling
from streamengine.calls.conversation import characters
from streamengine.calls.format import CallFormat, Tool
from streamengine.checks import shown
from streamengine.config import EngineConfig
from streamengine.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from streamengine.generate import Generate
from streamengine.guided.formats import read_format
from streamengine.guided.grammar import Grammar
from streamengine.guided.leniency import left_out
from streamengine.guided.tools import grammar_of, read_tools
from streamengine.request import Request
from streamengine.sampling import SamplingParams
from streamengine.tokenizer import NO_OPTIONS, Tokenizer, read_messages

INLINE_CHARACTERS = 4096
"""Above, tokenizing takes more than about a millisecond. What a template takes for messages nobody knows."""

INLINE_TOKENS = 200
"""The same, of tokens whose text is made."""

WORKER_THREADS = 2

T = TypeVar("T")

MAX_PROMPT_LOGPROBS_BYTES = 32 * 1024 * 1024
LOGPROB_BYTES = 200
"""What one log-probability with its token costs in memory."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was read: the prompt's tokens, the words that may not be in the answer, and what it must look like."""

    ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()
    """What of a schema that is not strict will not be enforced."""
    calls: CallFormat | None = None
    """How calls of tools are written, where some may come."""


class Intake:
    """The limits and the vocabulary of one model.

    An answer may be as long as what ``limit`` leaves beside the prompt: the model's context, or the whole
    KV cache if that is smaller (the last token is never written to it).
    """

    def __init__(self, config: EngineConfig, model: ModelSpec, kv: KVSpec, tokenizer: Tokenizer) -> None:
        self._config = config
        self._kv = kv
        self._pages = kv.pages - 1 - kv.reserved
        self.limit = min(model.max_model_len, self._pages * kv.page_size + 1)
        self.tokenizer = tokenizer
        self._vocab_size = model.vocab_size
        self._eos = model.eos_token_ids
        self._limiter = anyio.CapacityLimiter(WORKER_THREADS)

    async def aside(self, work: Callable[[], T], tokens: int) -> T:
        """What ``work`` gives, which takes some microseconds for each of so many ``tokens``."""
        return work() if tokens <= INLINE_TOKENS else await anyio.to_thread.run_sync(work, limiter=self._limiter)

    async def read(self, generate: Generate, *, single: bool) -> Prompt:
        """Check what can be checked without the prompt, and tokenize.

        Raises:
            InvalidRequest: no or more than one kind of prompt, an empty one, ids outside of the vocabulary, more
                answers than `EngineConfig` allows, or messages that the template refuses.
            ContextLengthExceeded: no token of an answer would fit behind it.
            UnsupportedFeature: messages with parts that are no text; more than one answer where ``single`` is; an
                engine that has none of its own.
            GrammarError: a schema that is none, or over a limit. What the grammar engine refuses, the core says.
        """
        if self._config.transfer is not None and self._config.transfer.role == "prefill":
            raise UnsupportedFeature("this engine has role prefill: it computes prompts for its peers, and no answers")
        self._check_answers(generate.sampling, single)
        self._check_vocabulary(generate.sampling)
        self._check_continues(generate)
        name = _the_one_given(generate)
        value, words = getattr(generate, name), generate.sampling.bad_words
        options = generate.chat_template_kwargs
        if options and name != "messages":
            raise InvalidRequest("chat_template_kwargs need messages", param="chat_template_kwargs")

        def work() -> Prompt:
            grammar = _grammar(generate)
            if box := read_tools(generate.tools, generate.tool_choice, generate.parallel_tool_calls):
                _check_tools_fit(generate)
                calls = self.tokenizer.calls()
                ids = self._read_messages(value, options, box.tools)
                return Prompt(ids, self._read_bad_words(words), grammar_of(box, calls), calls=calls)
            ids = self._read_messages(value, options) if options else getattr(self, f"_read_{name}")(value)
            warnings = left_out(grammar) if grammar is not None and grammar.lenient else ()
            return Prompt(ids, self._read_bad_words(words), grammar, warnings)

        short = name == "token_ids" or (isinstance(value, str) and len(value) <= INLINE_CHARACTERS)
        short = short and generate.response_format is None and not generate.tools
        if short and sum(map(len, words)) <= INLINE_CHARACTERS // 4:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    def request(self, number: int, prompt: Prompt, generate: Generate, seed: int) -> Request:
        """The request for a prompt of `read`; ``seed`` is used where none was asked for.

        Raises:
            ContextLengthExceeded: prompt and answer together do not fit.
            InvalidRequest: no token could be drawn, or the log-probabilities of the prompt are too many.
            UnsupportedFeature: guessing tokens where the draw depends on what was drawn before; what does not go
                together with a grammar.
        """
        params = generate.sampling
        if prompt.grammar is not None:
            params = _with_grammar(params)
        ends = tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}))
        sampling = params.resolve(seed, ends, prompt.bad_words)
        _check_choice_is_left(sampling, self._vocab_size)
        _check_prompt_logprobs(params, len(prompt.ids))
        plain = not (sampling.needs_history or params.beam_width)
        if params.speculate and not plain:
            raise UnsupportedFeature(
                "speculate cannot be combined with penalties, bad_words or min_tokens", param="speculate"
            )
        speculate = self._config.speculate_tokens if params.speculate is None else params.speculate
        return Request(
            id=number,
            prompt=prompt.ids,
            max_tokens=self._max_tokens(params, len(prompt.ids)),
            sampling=sampling,
            stop_token_ids=ends,
            n=params.answers,
            beam_width=params.beam_width,
            length_penalty=params.length_penalty,
            speculate=speculate if plain else 0,
            prompt_logprobs=params.prompt_logprobs,
            tenant=generate.tenant,
            priority=generate.priority,
            grammar=prompt.grammar,
            answered=self._answered(generate, self._max_tokens(params, len(prompt.ids))),
        )

    def _max_tokens(self, params: SamplingParams, prompt: int) -> int:
        """What was asked for, or what fits: the context, or the KV cache if the answers fill that before."""
        room, asked = self.limit - prompt, params.max_tokens
        if asked is not None and asked > room:
            raise ContextLengthExceeded(
                f"a prompt of {prompt} tokens and max_tokens {asked} make {prompt + asked} tokens; "
                f"the context holds {self.limit}",
                param="max_tokens",
                prompt_tokens=prompt,
                max_tokens=asked,
                limit=self.limit,
            )
        if asked is not None:
            return asked
        # Answers to one prompt share its pages but the one of its last token; each has its own from there on.
        answers, size = max(params.answers, params.beam_width), self._kv.page_size
        shared, rest = divmod(prompt - 1, size)
        room = min(room, (self._pages - shared) // answers * size - rest)
        if room < max(params.min_tokens, 1):
            name = "beam_width" if params.beam_width else "n" if params.best_of is None else "best_of"
            raise ContextLengthExceeded(
                f"a prompt of {prompt} tokens leaves room for {max(room, 0)} tokens in each of {answers} answers",
                param="min_tokens" if room > 0 else name,
                prompt_tokens=prompt,
                answers=answers,
                room=max(room, 0),
            )
        return room

    def _check_continues(self, generate: Generate) -> None:
        tokens, params = generate.continues, generate.sampling
        if tokens is None:
            return
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes) or not tokens:
            raise InvalidRequest("continues must be a list of at least one id", param="continues")
        if params.answers > 1 or params.beam_width:
            name = "beam_width" if params.beam_width else "n" if params.best_of is None else "best_of"
            raise UnsupportedFeature(f"{name} cannot be combined with continues: it is one answer", param="continues")
        if params.prompt_logprobs is not None:
            text = "prompt_logprobs cannot be combined with continues: they belong to the answer's beginning"
            raise UnsupportedFeature(text, param="continues")
        self.check_ids(tokens, "continues")

    def _answered(self, generate: Generate, max_tokens: int) -> tuple[int, ...]:
        answered = self.check_ids(generate.continues or (), "continues")
        if len(answered) > max_tokens:
            text = f"continues has {len(answered)} tokens; the answer has at most {max_tokens}"
            raise InvalidRequest(text, param="continues", tokens=len(answered), max_tokens=max_tokens)
        return answered

    def _check_answers(self, params: SamplingParams, single: bool) -> None:
        bounds = {"max_n": self._config.max_n, "max_num_seqs": self._config.max_num_seqs}
        if params.beam_width:  # a search cannot begin with more beams than there are tokens
            bounds["vocab_size"] = self._vocab_size
        for name, most in bounds.items():
            for field in ("n", "best_of", "beam_width"):
                value = getattr(params, field)
                if value is not None and value > most:
                    raise InvalidRequest(f"{field} must be at most {name} {most}, not {value}", param=field)
        if single and params.answers > 1:
            field = "n" if params.n > 1 else "best_of"
            raise UnsupportedFeature(f"{field} above 1 cannot be streamed: use generate()", param=field)

    def _check_vocabulary(self, params: SamplingParams) -> None:
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids(params.allowed_token_ids, "allowed_token_ids")
        self.check_ids(tuple(params.bias_by_id), "logit_bias")
        for word in params.bad_words:
            if not isinstance(word, str):
                self.check_ids(word, "bad_words")

    def _read_bad_words(self, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Each text as it begins a line and as it follows a space: two kinds of token in most vocabularies."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                found[tuple(word)] = None
                continue
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                found[self._accept(self.tokenizer.encode_part(text), "bad_words")] = None
        return tuple(found)

    def _read_token_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not ids:
            raise InvalidRequest("token_ids must be a list of at least one id", param="token_ids")
        self._check_room(len(ids), "token_ids")
        return self.check_ids(ids, "token_ids")

    def _read_prompt(self, text: str) -> tuple[int, ...]:
        if not text:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        self._check_characters(len(text), "prompt")
        return self._accept(self.tokenizer.encode(text), "prompt")

    def _read_messages(
        self, value: object, options: Mapping[str, Any] | None = None, tools: Sequence[Tool] = ()
    ) -> tuple[int, ...]:
        if isinstance(value, Sequence):
            # Each is at least a token, and reading a million of them takes a while.
            self._check_room(len(value), "messages", "at least ")
        messages = read_messages(value)
        self._check_characters(sum(map(characters, messages)), "messages")
        return self._accept(self.tokenizer.chat(messages, tools, options or NO_OPTIONS), "messages")

    def _accept(self, ids: list[int], name: str) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest(f"{name} gives no token", param=name)
        self._check_room(len(ids), name)
        return self.check_ids(ids, name)

    def _check_characters(self, characters: int, name: str) -> None:
        """Refuse a text that cannot fit before the tokenizer spends seconds on it."""
        self._check_room(-(-characters // self.tokenizer.longest_token), name, "at least ")

    def _check_room(self, tokens: int, name: str, bound: str = "") -> None:
        if tokens >= self.limit:
            raise ContextLengthExceeded(
                f"{name} has {bound}{tokens} tokens; the context holds {self.limit}, one answer token included",
                param=name,
                prompt_tokens=tokens,
                limit=self.limit,
            )

    def check_ids(self, ids: Sequence[int], name: str) -> tuple[int, ...]:
        """Exact ints: see `checks`."""
        exact = tuple(token if type(token) is int else _exact_id(token) for token in ids)
        if exact and not 0 <= min(exact) <= max(exact) < self._vocab_size:
            wrong = next(i for i, token in enumerate(exact) if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"{name} holds {shown(ids[wrong])}, which is no token: ids are 0 to {self._vocab_size - 1}",
                param=name,
                token=exact[wrong],
                vocab_size=self._vocab_size,
            )
        return exact


def _grammar(generate: Generate) -> Grammar | None:
    grammar = read_format(generate.response_format)
    if not generate.close_document:
        return grammar
    if grammar is None:
        raise InvalidRequest("close_document needs a response_format", param="close_document")
    if generate.sampling.logprobs is not None:
        raise UnsupportedFeature("close_document cannot be combined with logprobs", param="close_document")
    return structs.replace(grammar, close=True)


def _check_tools_fit(generate: Generate) -> None:
    if generate.messages is None:
        raise InvalidRequest("tools need messages: the chat template tells the model of them", param="tools")
    if generate.response_format is not None and generate.response_format != {"type": "text"}:
        raise UnsupportedFeature("response_format cannot be combined with tools", param="response_format")


def _with_grammar(params: SamplingParams) -> SamplingParams:
    """The grammar says when an answer may end, so `min_tokens` has no say."""
    if params.ignore_eos:
        raise UnsupportedFeature("ignore_eos cannot be combined with response_format or tools", param="ignore_eos")
    if params.beam_width:
        raise UnsupportedFeature("beam_width cannot be combined with response_format or tools", param="beam_width")
    return structs.replace(params, min_tokens=0) if params.min_tokens else params


def _exact_id(token: object) -> int:
    return -1 if isinstance(token, bool) or not isinstance(token, Integral) else index(token)


def _the_one_given(generate: Generate) -> str:
    names = ("prompt", "messages", "token_ids")
    given = [name for name in names if getattr(generate, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequest(
            f"give exactly one of prompt, messages and token_ids, not {found}", param=given[1] if given else "prompt"
        )
    return given[0]


def _check_choice_is_left(sampling: Sampling, vocab_size: int) -> None:
    """Some token must stay possible, whatever has been drawn before."""
    refused = {word[-1] for word in sampling.bad_words} | set(sampling.barred_token_ids)
    allowed = set(sampling.allowed_token_ids)
    if allowed <= refused if allowed else len(refused) >= vocab_size:
        names = ("bad_words", sampling.bad_words), ("min_tokens", sampling.barred_token_ids)
        by = " and ".join(name for name, given in names if given)
        raise InvalidRequest(
            f"allowed_token_ids leave no token that {by} could not take away", param="allowed_token_ids"
        )


def _check_prompt_logprobs(params: SamplingParams, prompt: int) -> None:
    if params.prompt_logprobs is None:
        return
    size = prompt * (params.prompt_logprobs + 1) * LOGPROB_BYTES
    if size > MAX_PROMPT_LOGPROBS_BYTES:
        raise InvalidRequest(
            f"prompt_logprobs {params.prompt_logprobs} of {prompt} tokens need {size} bytes, "
            f"at most {MAX_PROMPT_LOGPROBS_BYTES}",
            param="prompt_logprobs",
            bytes=size,
            limit=MAX_PROMPT_LOGPROBS_BYTES,
        )
