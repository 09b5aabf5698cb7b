"""One request: what was asked, how far it is, and which events may move it where.

Hop values: `Request` travels from the engine to the core, `Delta` back. `Sequence` is the scheduler's
own mutable record and never leaves it.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec

from compiled.step import Logprob, Sampling
from streamengine.guided.grammar import Constraint, Grammar
from streamengine.prefix import Chain
from streamengine.speculation import Lookup

MAX_SEED = 2**63 - 1


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Engine → core. Token ids only; every number is already within the model's limits.

    ``id`` is unique for the life of the core. ``stop_token_ids`` are all ids that end the answer, the model's
    end-of-sequence ids among them unless the user ignores those.

    ``n`` answers are drawn, told apart by `Delta.index`; the i-th draws with ``seed + i``. With ``beam_width`` the
    answers are instead the ``n`` best of a beam search (``n <= beam_width``), told at the end, best first.
    ``speculate`` is how many tokens may be guessed from the request's own text in a step. ``prompt_logprobs``
    asks for the log-probability of each prompt token but the first, and of that many likeliest ones.
    ``tenant`` separates prefixes and shares the engine fairly; a higher ``priority`` goes first.
    ``grammar`` is what every answer must keep to, and ``jump`` lets tokens that it leaves no choice about be taken
    without asking the model. ``answered`` are the answer's first tokens, where another engine gave them: they count
    as its own in everything but `Delta`, which tells only what comes after them. When a request with a ``transfer``
    ends behind a token, its pages are held under that name.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    speculate: int = 0
    prompt_logprobs: int | None = None
    tenant: str = ""
    priority: int = 0
    grammar: Grammar | None = None
    jump: bool = True
    answered: tuple[int, ...] = ()
    transfer: str = ""


QUEUE_TIMEOUT = "queue_timeout"
"""An abort's cause that ends a request in `QueueTimeout`, and only if no step was planned for it yet."""

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


class Finish(msgspec.Struct, frozen=True):
    """Why a request ended. ``cause`` says more: ``stop_token``, ``max_tokens``, an abort's reason,
    or an error's code (then ``message`` is its text and ``param`` the field at fault)."""

    reason: FinishReason
    cause: str = ""
    message: str = ""
    param: str | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Core → engine: what one step did for one answer of one request.

    ``tokens`` are new answer tokens, the one that ended it included; ``computed`` counts the prompt
    tokens whose KV is there (it starts again from 0 after a preemption); ``queued_s`` is given once,
    with the request's first step. There is one for every row of a step and for every step of a request,
    so it travels as an array.

    ``index`` says which of the request's ``n`` answers this is. ``cached`` is given once, with ``queued_s``: the
    prompt tokens that were found in the prefix cache. ``logprobs`` match ``tokens``, ``prompt_logprobs``
    follow each other from the prompt's second token on; both only where they were asked for.
    ``beam_score`` comes with the finish of a beam search's answer. ``forced`` of the tokens were not sampled: the
    grammar left no choice. ``remote`` says what came of a prefill by another engine, the last word being the one
    that holds: ``done``, or why not.
    """

    request: int
    tokens: tuple[int, ...] = ()
    computed: int = 0
    queued_s: float | None = None
    finish: Finish | None = None
    index: int = 0
    cached: int = 0
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    beam_score: float | None = None
    forced: int = 0
    remote: str = ""


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
    """One answer of a request inside the scheduler: its tokens, its pages, and how much of it is computed.

    ::

        0 ............ computed ......... len(tokens) .... known
        | KV in pages  | to be computed   | in flight     |
        | tokens: prompt + answer         | pending       |

    ``computed`` counts the tokens whose KV is written or being written by a step in flight; ``pending``
    counts sampled tokens that a step in flight is about to deliver, so they are known to exist.
    A step gives it tokens until ``computed`` catches up with ``known``. ``pages`` is the page table.
    ``queued_s`` is the time from arrival to the first step, until it has been told, ``cached`` likewise.
    """

    request: Request
    arrival: float
    tokens: list[int]
    state: State = State.WAITING
    computed: int = 0
    pending: int = 0
    pages: tuple[int, ...] = ()
    landed: tuple[int, ...] = ()
    """While it waits: the page table of its prompt, which another engine computed. See `landed_tokens`."""
    begun: bool = False
    """Another engine computed its prompt, whose turn came there: what that took has been told, or stands in
    ``queued_s`` and ``cached``."""
    queued_s: float | None = None
    cached: int = 0
    preemptions: int = 0
    index: int = 0
    rank: tuple[float, ...] = ()
    """The smaller the more important; of one request by ``index``."""
    sampling: Sampling = field(init=False)
    needs_history: bool = field(init=False)
    reach: int = field(init=False)
    """Tokens whose KV it can ever need: the last answer token is never computed."""
    most_pages: int = 0
    """Pages for all those."""
    since: int = 0
    """Number of the step that it was admitted with: what older steps did is not in its pages."""
    unborn: int = 0
    """Forks that it is still to have; their seats are kept."""
    copy_from: int | None = None
    """A fork's: the page that is to be copied to its own last one, held until then."""
    lockstep: bool = False
    """Its next token is planned only when the ones before it are there: for guesses and beams."""
    sampled_from: int = 0
    """Number of the first step whose samples count: before that tokens were forced in place of one in flight."""
    scored: int = 0
    """Prompt tokens whose log-probability was told, the first one aside, which has none."""
    chain: Chain | None = None
    lookup: Lookup | None = None
    constraint: Constraint | None = None
    total: float = 0.0
    """A beam's: the sum of its answer's log-probabilities."""
    top: tuple[tuple[int, float], ...] = ()
    """A beam's: likeliest next tokens, until all beams of its request have theirs."""

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.needs_history = self.sampling.needs_history
        self.reach = len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def landed_tokens(self) -> int:
        """Those of ``landed`` that need not be computed: where several answers begin, the last one is once more."""
        return min(len(self.request.prompt), len(self.tokens) - 1) if self.landed else 0

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def apply(self, event: Event) -> None:
        """Move along `LIFECYCLE`. Raises KeyError on a move that the table does not have: our bug."""
        self.state = LIFECYCLE[self.state][event]
