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
    """How one row's next token is drawn from its logits.

    ``temperature == 0`` is greedy and ignores the rest. ``top_k == 0``, ``top_p == 1`` and
    ``min_p == 0`` are off. The random number is a function of (``seed``, position) alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    ``tokens`` are computed at positions ``start .. start + len(tokens) - 1``; ``pages`` is the page
    table from position 0 and covers at least ``start + len(tokens)`` positions. With ``sampling`` the
    logits of the last token give one new token; without, the row only fills the KV cache (a prompt's
    chunk). ``pending`` says that the last entry of ``tokens`` is a placeholder for the token that the
    step in flight before this one samples for the same request.
    """

    request: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sampling: Sampling | None = None
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: never empty, at most one row per request."""

    number: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[i]`` are the new tokens of ``step.rows[i]``: empty where nothing was sampled.

    ``seconds`` is the time from submit to the last token's arrival on the host.
    """

    number: int
    tokens: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The physical KV cache: ``pages`` pages of ``page_size`` tokens and ``page_bytes`` bytes each.

    Page `PADDING_PAGE` is among them and is never handed out.
    """

    pages: int
    page_size: int
    page_bytes: int


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
        """Launch ``step``; its arguments are read before this returns."""
        ...

    def warmup(self) -> None:
        """Run every shape that serving needs, so that nothing compiles afterwards."""
        ...

    def statistics(self) -> dict[str, float]:
        """A snapshot of counters, sizes in bytes and times in seconds, by name."""
        ...
