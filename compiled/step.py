"""The contract between whoever schedules and whoever executes.

A `Step` goes down, a `StepResult` comes up; both are frozen and hold only what msgpack can carry.
Standard library only, so that a scheduler, a test or a fake runner never imports torch.

Legend used all over ``compiled``: T tokens in the step, R rows (requests), L layers, H query heads,
K key/value heads, D head size, P pages, S page size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

PADDING_PAGE = 0
"""Page that no request ever owns: padded tokens write and read there."""


class LoadError(Exception):
    """The model cannot be served: unknown, broken, or of a kind that is not supported. One line."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row's next token is drawn from its logits. Every default means: off.

    In this order: ``allowed_token_ids`` (empty: all) → ``bad_words`` (a token that would complete one) →
    ``barred_token_ids`` while fewer than ``min_tokens`` answer tokens are there → ``logit_bias`` →
    ``repetition_penalty`` (prompt and answer), ``presence_penalty``, ``frequency_penalty`` (answer) → greedy if
    ``temperature == 0``, else temperature → min_p → top_k → top_p → typical_p → one draw. The random number is a
    function of (``seed``, position) alone. Where all this leaves no token, bars and biases give way and
    ``allowed_token_ids`` alone holds.

    ``logprobs`` asks for the log-probability of the raw logits of the chosen token and of that many likeliest
    ones (0: the chosen one only; None: none).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    barred_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the row must bring the tokens that are there already."""
        return bool(self.penalises or self.bad_words or self.min_tokens)

    @property
    def penalises(self) -> bool:
        """Whether tokens that are there already change the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def edits(self) -> bool:
        """Whether the logits may be changed before the highest is taken or one is drawn."""
        return bool(self.needs_history or self.logit_bias or self.allowed_token_ids)


@dataclass(frozen=True, slots=True)
class Row:
    """The share of one request's answer number ``index`` in a step.

    ``tokens`` are computed at positions ``start .. start + len(tokens) - 1``; ``pages`` is the page
    table from position 0 and covers at least ``start + len(tokens)`` positions. With ``sampling`` the
    logits of the last token give one new token; without, the row only fills the KV cache (a prompt's
    chunk). ``pending`` says that the last entry of ``tokens`` is a placeholder for the token that the
    step in flight before this one samples for the same answer.

    Pages of positions that no token of the row sees (see `KVSpec.window`) are not read.

    The last ``drafts`` of ``tokens`` are guesses: a token is sampled after each of the last ``1 + drafts``
    tokens, as if the guesses before it were right; which of them count is the scheduler's to say.
    ``history`` is every token up to the end of ``tokens`` where the sampling needs it, of which the first
    ``prompt_length`` are the prompt. ``targets`` are the known tokens behind ``tokens[0], tokens[1], …`` whose
    log-probabilities are wanted (a prompt's), with ``targets_top`` likeliest ones beside each.

    ``mask`` is the first of its ``1 + drafts`` rows in `Step.masks`: which tokens its grammar leaves.
    """

    request: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sampling: Sampling | None = None
    pending: bool = False
    drafts: int = 0
    history: tuple[int, ...] = ()
    prompt_length: int = 0
    targets: tuple[int, ...] = ()
    targets_top: int = 0
    index: int = 0
    mask: int | None = None


class Masks(Protocol):
    """Bits of the tokens that may be sampled, which may still be in the making while the forward pass runs.

    With a step in flight before, they may hang on what that samples: then they are not even begun, and neither
    ``words`` nor `wait` is asked for, before its result was taken in.
    """

    @property
    def words(self) -> int: ...

    def wait(self) -> memoryview:
        """Block until they are there: int32 words ``[rows, words]``, bit ``i % 32`` of word ``i // 32`` set where
        token ``i`` is allowed. Each row has at least one."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: never empty, at most one row per answer of a request.

    ``copies`` are pages ``(from, to)`` that are copied, in order, before anything else is read or written.
    """

    number: int
    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()
    masks: Masks | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithms of the raw logits' softmax, never below `LOWEST_LOGPROB`: JSON knows no -inf.

    ``rank`` counts the tokens that were likelier, plus 1. ``top`` are the likeliest tokens, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[i]`` are the tokens sampled for ``step.rows[i]``: none, or ``1 + drafts``.

    ``seconds`` is the time from submit, or from the arrival of the step in flight before it if that is later, to the
    last token's arrival on the host. ``logprobs[i]`` match ``tokens[i]`` and ``scores[i]`` match ``targets`` where
    they were asked for; both are empty when no row of the step asked.
    """

    number: int
    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    scores: tuple[tuple[Logprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The physical KV cache: ``pages`` pages of ``page_size`` tokens and ``page_bytes`` bytes each.

    Page `PADDING_PAGE` is among them and is never handed out. With a ``window`` every layer attends to the last
    ``window`` tokens only (the token itself included), so older pages may be given back: `PADDING_PAGE`
    stands in their place in the page table.

    ``dtype``, ``layers`` and ``layout`` say what the bytes of a page mean: see `compiled.kv_store.KVShape.layout`.
    Requests may not need the last ``reserved`` of the pages, which whoever schedules keeps for other ends.
    """

    pages: int
    page_size: int
    page_bytes: int
    window: int | None = None
    dtype: str = ""
    layers: int = 0
    layout: str = ""
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The bytes of a KV cache that lies in this machine's memory, for whoever moves whole pages of it.

    ``view`` is writable and holds ``pages`` times ``page_bytes`` bytes, page after page. ``descriptor`` is of the
    memfd which they are the beginning of, None where they are in none; it is closed with the cache.
    """

    view: memoryview
    pages: int
    page_bytes: int
    descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the outside must know of a loaded model.

    ``vocab_size`` counts the ids that may be given and sampled (without padding rows of the LM head);
    ``max_model_len`` is prompt + answer in tokens; ``eos_token_ids`` are the model's own.
    """

    name: str
    folder: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Handle(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Executes steps in the order of their submission.

    ``depth`` is how many steps may be in flight: 1 means that `submit` returns a finished handle
    and that no row is ever ``pending``.
    """

    model: ModelSpec
    kv: KVSpec
    depth: int

    def submit(self, step: Step) -> Handle:
        """Launch ``step``; its arguments are read before this returns, but for `Step.masks`: these are waited for
        when the next step is submitted or this one's result is, if a step is in flight."""
        ...

    def warmup(self) -> None:
        """Run every shape that serving needs, so that nothing compiles afterwards."""
        ...

    def statistics(self) -> dict[str, float]:
        """A snapshot of counters, sizes in bytes and times in seconds, by name."""
        ...

    def kv_memory(self) -> KVMemory | None:
        """None where other devices alone can reach it. No step that reads or writes a page may be in flight while
        somebody else writes the same page."""
        ...
