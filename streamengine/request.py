"""One request: what was asked, how far it is, and which events may move it where.

Hop values: `Request` travels from the engine to the core, `Delta` back. `Sequence` is the scheduler's
own mutable record and never leaves it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec

from compiled.step import Sampling
from streamengine.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow float32."""

MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_STOP_TOKEN_IDS = 64
"""Each sampled token is compared with all of them."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an answer is drawn and where it ends. Validated here, before anything reaches the core.

    Args:
        max_tokens: answer tokens at most; ``None`` is as many as the context holds.
        temperature: 0 is greedy.
        top_k: 0 or -1 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: the same seed gives the same tokens, whatever else the engine does; ``None`` draws one.
        stop: strings that end the answer and are not part of it.
        stop_token_ids: ids that end the answer.
        ignore_eos: go on after the model's end-of-sequence token.

    Raises:
        InvalidRequest: with ``param`` naming the field.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, optional=True)
        _list("stop", self.stop, str, MAX_STOPS)
        for stop in self.stop:
            if not 1 <= len(stop) <= MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"a stop string must have 1 to {MAX_STOP_LENGTH} characters, not {len(stop)}", param="stop"
                )
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be true or false", param="ignore_eos")
        _list("stop_token_ids", self.stop_token_ids, int, MAX_STOP_TOKEN_IDS)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    def resolve(self, seed: int) -> Sampling:
        """The sampler's view; ``seed`` is used where none was asked for."""
        greedy = self.temperature < GREEDY_BELOW
        return Sampling(
            temperature=0.0 if greedy else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed if self.seed is None else self.seed,
        )


def _integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be {low} to {high}, not {value}", param=name)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {value!r}", param=name)
    # Put so that NaN, which compares false with everything, is refused as well.
    if not low <= value <= high or (above and value == low):
        raise InvalidRequest(f"{name} must be {'above ' if above else ''}{low:g} to {high:g}, not {value}", param=name)


def _list(name: str, value: object, of: type, most: int) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(item, of) for item in value):
        raise InvalidRequest(f"{name} must be a list of {'strings' if of is str else 'integers'}", param=name)
    if len(value) > most:
        raise InvalidRequest(f"{name} holds {len(value)} entries, at most {most}", param=name)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → core. Token ids only; every number is already within the model's limits.

    ``id`` is unique for the life of the core. ``stop_token_ids`` are all ids that end the answer, the model's
    end-of-sequence ids among them unless the user ignores those.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()


FinishReason = Literal["stop", "length", "cancelled", "error"]


class Finish(msgspec.Struct, frozen=True):
    """Why a request ended. ``cause`` says more: ``stop_token``, ``max_tokens``, an abort's reason,
    or an error's code (then ``message`` is its text)."""

    reason: FinishReason
    cause: str = ""
    message: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Core → engine: what one step did for one request.

    ``tokens`` are new answer tokens, the one that ended it included; ``computed`` counts the prompt
    tokens whose KV is there (it starts again from 0 after a preemption); ``queued_s`` is given once,
    with the request's first step. There is one for every row of a step and for every step of a request,
    so it travels as an array.
    """

    request: int
    tokens: tuple[int, ...] = ()
    computed: int = 0
    queued_s: float | None = None
    finish: Finish | None = None


class State(Enum):
    """Where a sequence is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Event(Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"


LIFECYCLE: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ADMIT: State.RUNNING, Event.FINISH: State.FINISHED},
    State.RUNNING: {Event.PREEMPT: State.WAITING, Event.FINISH: State.FINISHED},
    State.FINISHED: {},
}


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the scheduler: its tokens, its pages, and how much of it is computed.

    ::

        0 ............ computed ......... len(tokens) .... known
        | KV in pages  | to be computed   | in flight     |
        | tokens: prompt + answer         | pending       |

    ``computed`` counts the tokens whose KV is written or being written by a step in flight; ``pending``
    counts sampled tokens that a step in flight is about to deliver, so they are known to exist.
    A step gives it tokens until ``computed`` catches up with ``known``. ``pages`` is the page table.
    ``queued_s`` is the time from arrival to the first step, until it has been told.
    """

    request: Request
    arrival: float
    tokens: list[int]
    state: State = State.WAITING
    computed: int = 0
    pending: int = 0
    pages: tuple[int, ...] = ()
    queued_s: float | None = None
    preemptions: int = 0

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def reach(self) -> int:
        """Tokens whose KV it can ever need: the last answer token is never computed."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    def apply(self, event: Event) -> None:
        """Move along `LIFECYCLE`. Raises KeyError on a move that the table does not have: our bug."""
        self.state = LIFECYCLE[self.state][event]
