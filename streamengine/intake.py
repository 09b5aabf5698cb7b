"""From what a user asks to what the core is told: tokens, and every number within the model's limits.

Refuses here, before the core sees anything, whatever a request can be refused for by itself. Never holds
up the event loop: what takes longer than a few milliseconds runs in a worker thread.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, TypedDict

import anyio
import anyio.to_thread
import msgspec

from compiled.step import KVSpec, ModelSpec
from streamengine.errors import ContextLengthExceeded, InvalidRequest
from streamengine.request import Request, SamplingParams
from streamengine.tokenizer import Tokenizer, check_text, read_messages

INLINE_CHARACTERS = 4096
INLINE_MESSAGES = 32
"""Above either, tokenizing takes more than about a millisecond."""

WORKER_THREADS = 2


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks. Exactly one of ``prompt``, ``messages`` and ``token_ids``.

    Args:
        prompt: plain text, without a template.
        messages: for the model's chat template: ``{"role": …, "content": …}``.
        token_ids: taken as they are.
        queue_s: seconds until the first step at most; then the request ends in `QueueTimeout`.
        total_s: seconds until the end at most; then it is cancelled, with the cause ``timeout``.
    """

    prompt: str | None = None
    messages: Sequence[dict[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    sampling: SamplingParams = SamplingParams()
    queue_s: float | None = None
    total_s: float | None = None


class Asked(TypedDict, total=False):
    """The fields of `Generate` but ``prompt``, as keyword arguments."""

    messages: Sequence[dict[str, Any]] | None
    token_ids: Sequence[int] | None
    sampling: SamplingParams
    queue_s: float | None
    total_s: float | None


class Intake:
    """The limits and the vocabulary of one model.

    An answer may be as long as what ``limit`` leaves beside the prompt: the model's context, or the whole
    KV cache if that is smaller (the last token is never written to it).
    """

    def __init__(self, model: ModelSpec, kv: KVSpec, tokenizer: Tokenizer) -> None:
        self.limit = min(model.max_model_len, (kv.pages - 1) * kv.page_size + 1)
        self.tokenizer = tokenizer
        self._vocab_size = model.vocab_size
        self._eos = model.eos_token_ids
        self._limiter = anyio.CapacityLimiter(WORKER_THREADS)

    async def read(self, generate: Generate) -> tuple[int, ...]:
        """The prompt's ids.

        Raises:
            InvalidRequest: no or more than one kind of prompt, an empty one, ids outside of the vocabulary,
                an impossible deadline or stop, or messages that the template refuses.
            ContextLengthExceeded: no token of an answer would fit behind it.
            UnsupportedFeature: messages with parts that are no text.
        """
        _check_deadline("queue_s", generate.queue_s)
        _check_deadline("total_s", generate.total_s)
        for stop in generate.sampling.stop:
            check_text(stop, "stop")
        self._check_ids(generate.sampling.stop_token_ids, "stop_token_ids")
        name = _the_one_given(generate)
        value = getattr(generate, name)
        if name == "token_ids":
            return self._read_ids(value)
        work: Callable[[Any], tuple[int, ...]] = self._read_prompt if name == "prompt" else self._read_messages
        if _is_short(value):
            return work(value)
        return await anyio.to_thread.run_sync(work, value, limiter=self._limiter)

    def request(self, number: int, prompt: tuple[int, ...], sampling: SamplingParams, seed: int) -> Request:
        """The request for a prompt of `read`; ``seed`` is used where none was asked for.

        Raises:
            ContextLengthExceeded: prompt and answer together do not fit.
        """
        room = self.limit - len(prompt)
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room:
            raise ContextLengthExceeded(
                f"a prompt of {len(prompt)} tokens and max_tokens {max_tokens} make {len(prompt) + max_tokens} tokens; "
                f"the context holds {self.limit}",
                param="max_tokens",
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                limit=self.limit,
            )
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)}
        return Request(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling.resolve(seed),
            stop_token_ids=tuple(sorted(ends)),
        )

    def _read_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not ids:
            raise InvalidRequest("token_ids must be a list of at least one id", param="token_ids")
        self._check_room(len(ids), "token_ids")
        self._check_ids(ids, "token_ids")
        return tuple(ids)

    def _read_prompt(self, text: object) -> tuple[int, ...]:
        text = check_text(text, "prompt")
        if not text:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        self._check_characters(len(text), "prompt")
        return self._accept(self.tokenizer.encode(text), "prompt")

    def _read_messages(self, value: object) -> tuple[int, ...]:
        if isinstance(value, Sequence):
            # Each is at least a token, and reading a million of them takes a while.
            self._check_room(len(value), "messages", "at least ")
        messages = read_messages(value)
        self._check_characters(sum(len(message["content"]) for message in messages), "messages")
        return self._accept(self.tokenizer.chat(messages), "messages")

    def _accept(self, ids: list[int], name: str) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest(f"{name} gives no token", param=name)
        self._check_room(len(ids), name)
        self._check_ids(ids, name)
        return tuple(ids)

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

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        for token in ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"{name} holds {token!r}, which is no token: ids are 0 to {self._vocab_size - 1}",
                    param=name,
                    token=token,
                    vocab_size=self._vocab_size,
                )


def _the_one_given(generate: Generate) -> str:
    names = ("prompt", "messages", "token_ids")
    given = [name for name in names if getattr(generate, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequest(
            f"give exactly one of prompt, messages and token_ids, not {found}", param=given[1] if given else "prompt"
        )
    return given[0]


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= INLINE_CHARACTERS
    if not isinstance(value, Sequence) or len(value) > INLINE_MESSAGES:
        return False
    contents = [message.get("content") for message in value if isinstance(message, dict)]
    return sum(len(content) if isinstance(content, str) else INLINE_CHARACTERS for content in contents) < (
        INLINE_CHARACTERS
    )


def _check_deadline(name: str, seconds: float | None) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds) or seconds <= 0:
        raise InvalidRequest(f"{name} must be a number of seconds above 0, not {seconds!r}", param=name)
