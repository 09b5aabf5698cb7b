"""How an answer is drawn and where it ends, in a user's words; every fault is refused by the name of its field.

What only a loaded model or an engine's config can tell (ids of the vocabulary, room, `max_n`) is for `intake`.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, structs

from compiled.step import Sampling
from streamengine.checks import MANY, check_text, exact_integer, exact_number, settle, shown
from streamengine.errors import InvalidRequest, UnsupportedFeature
from streamengine.request import MAX_SEED

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow float32."""

MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128
"""Characters, or ids."""
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20

Token = Annotated[int, Meta(ge=0, le=MANY)]
Count = Annotated[int, Meta(ge=1, le=MANY)]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Stops = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=1000)], ...], Meta(max_length=16)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How answers are drawn and where they end. `Sampling` says in which order the parts apply.

    An answer ends with the first of: a stop token (the model's end-of-sequence ones, ``stop_token_ids``), a
    completed stop string, ``max_tokens``. Where one token does several of these, the earlier in this list counts.
    Before ``min_tokens`` only the last of them ends it.

    Args:
        max_tokens: answer tokens at most; ``None`` is as many as the context holds.
        min_tokens: until there are so many, stop tokens are not drawn and stop strings have no effect.
        temperature: 0 is greedy.
        top_k: 0 or -1 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        typical_p: 1 is off.
        repetition_penalty: divides the logits of tokens in prompt or answer; 1 is off.
        presence_penalty: is taken off the logits of tokens in the answer, once.
        frequency_penalty: likewise, as often as the token is there.
        logit_bias: is added to logits, by token id; -100 to 100.
        bad_words: are not written: texts, at the beginning and inside of a line, or lists of ids.
        allowed_token_ids: no others are drawn; empty is all.
        seed: the same seed gives the same tokens, whatever else the engine does; ``None`` draws one.
        stop: strings that end the answer and are not part of it.
        stop_token_ids: ids that end the answer.
        include_stop_str_in_output: what ended the answer is part of its text.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: log-probabilities of each answer token and of so many likeliest ones; ``None`` is none.
        prompt_logprobs: the same of the prompt's tokens but the first.
        n: answers to one prompt; `Engine.generate` gives them as ``choices``.
        best_of: draw so many answers and give the ``n`` whose tokens are likeliest on average.
        beam_width: search the likeliest answers instead of drawing them, with so many beams; 0 is off.
        length_penalty: a beam's score is its log-probability divided by its length to this power.
        speculate: guess so many tokens a step from the request's own text: faster where it repeats itself, never
            another answer. ``None`` is the engine's own setting.

    Raises:
        InvalidRequest: a value that is no such thing or out of range.
        UnsupportedFeature: values that do not go together. ``param`` names the field in either case.
    """

    max_tokens: Count | None = None
    min_tokens: Token = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MANY)] = 0
    top_p: Share = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Mapping[int | str, float] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: Annotated[tuple[Token, ...], Meta(max_length=8192)] = ()
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Stops = ()
    stop_token_ids: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()  # each token is compared with all of them
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    n: Count = 1
    best_of: Count | None = None
    beam_width: Token = 0
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    speculate: Annotated[int, Meta(ge=0, le=16)] | None = None

    def __post_init__(self) -> None:
        settle(self, InvalidRequest)
        structs.force_setattr(self, "bad_words", _read_bad_words(self.bad_words))
        structs.force_setattr(self, "logit_bias", _read_logit_bias(self.logit_bias))
        self._check_together()

    @property
    def answers(self) -> int:
        """How many are drawn: more than ``n`` where the best are taken."""
        return self.n if self.best_of is None else self.best_of

    @property
    def bias_by_id(self) -> dict[int, float]:
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    def resolve(self, seed: int, barred: tuple[int, ...] = (), bad_words: tuple[tuple[int, ...], ...] = ()) -> Sampling:
        """The sampler's view.

        Args:
            seed: is used where none was asked for.
            barred: ids that may not be drawn before ``min_tokens``.
            bad_words: as ids.
        """
        greedy = self.temperature < GREEDY_BELOW or self.beam_width > 0
        ranked = self.answers > self.n  # by log-probability, asked for or not
        return Sampling(
            temperature=0.0 if greedy else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            seed=seed if self.seed is None else self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(sorted(self.bias_by_id.items())),
            allowed_token_ids=tuple(sorted(set(self.allowed_token_ids))),
            bad_words=bad_words,
            barred_token_ids=barred if self.min_tokens else (),
            min_tokens=self.min_tokens if barred else 0,
            logprobs=0 if ranked and self.logprobs is None else self.logprobs,
        )

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            text = f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}"
            raise InvalidRequest(text, param="min_tokens")
        if self.answers < self.n:
            raise InvalidRequest(f"best_of {self.best_of} is below n {self.n}", param="best_of")
        if not self.beam_width:
            if self.length_penalty != 1:
                raise UnsupportedFeature("length_penalty needs beam_width", param="length_penalty")
            return
        if self.n > self.beam_width:
            raise InvalidRequest(f"n {self.n} is above beam_width {self.beam_width}", param="n")
        # Beams compare the model's own probabilities, and what they write is known at the end.
        if self.temperature not in (0, 1):
            raise UnsupportedFeature("temperature cannot be combined with beam_width", param="temperature")
        for field in msgspec.structs.fields(self):
            if field.name not in _WITH_BEAMS and getattr(self, field.name) not in (field.default, [], {}):
                raise UnsupportedFeature(f"{field.name} cannot be combined with beam_width", param=field.name)


_WITH_BEAMS = {
    "max_tokens",
    "temperature",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "n",
    "beam_width",
    "length_penalty",
}


def _read_bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    name = "bad_words"
    if not isinstance(words, tuple | list):
        raise InvalidRequest("bad_words must be a list of strings or of lists of ids", param=name)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words holds {len(words)} entries, at most {MAX_BAD_WORDS}", param=name)
    read: list[str | tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str | tuple | list):
            raise InvalidRequest(f"bad_words holds {shown(word)}, neither a string nor a list of ids", param=name)
        if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
            text = f"each of bad_words must have 1 to {MAX_BAD_WORD_LENGTH} characters or ids, not {len(word)}"
            raise InvalidRequest(text, param=name)
        if isinstance(word, str):
            read.append(check_text(word, name))
        else:
            read.append(tuple(exact_integer(name, token, 0, MANY) for token in word))
    return tuple(read)


def _read_logit_bias(given: object) -> dict[int | str, float] | None:
    name = "logit_bias"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequest("logit_bias must be a map of token ids to numbers", param=name)
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias holds {len(given)} entries, at most {MAX_LOGIT_BIAS}", param=name)
    read: dict[int | str, float] = {}
    for token, bias in given.items():
        if isinstance(token, str):
            if not (token.isascii() and token.isdecimal() and len(token) <= 10):
                raise InvalidRequest(f"logit_bias holds {shown(token)}, which is no token id", param=name)
            token = int(token)
        read[exact_integer(name, token, 0, MANY)] = exact_number(name, bias, -100.0, 100.0)
    if len(read) < len(given):
        raise InvalidRequest("logit_bias names a token twice", param=name)
    return read
