"""What a compiled forward pass consists of, without its weights: the calls in order, and where each value comes from.

A recipe names parameters instead of holding them, so that it can be made before any weight is read, kept on
disk beside the compiled pieces, and bound to the weights in another process that never imports transformers.
Owns values only: nothing here traces, compiles, reads or runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compiled.attention.base import AttentionSpec
from compiled.work import Work


@dataclass(frozen=True, slots=True)
class Parameter:
    """State-dict ``names`` of the transformers module; several are concatenated along dimension 0 (merged linears).

    ``packed``: laid out by the linear kernel's own ``pack`` when it is bound; nothing else may read it then.
    """

    names: tuple[str, ...]
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """``Recipe.constants[index]``: a small tensor that no checkpoint holds, such as rotary frequencies."""

    index: int


@dataclass(frozen=True, slots=True)
class Fed:
    """Given in each step: ``ids``, ``positions``, ``rows``, or the number of tokens ``T`` or of logit rows ``R``."""

    name: str


Source = Parameter | Constant | Fed


@dataclass(frozen=True, slots=True)
class Run:
    """A call of the compiled piece ``key``: values ``inputs`` → values ``outputs``. ``name`` says where it stands."""

    name: str
    key: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of layer ``layer``: ``query, key, value`` and, where there are any, ``sinks`` → ``output``, all
    names of values."""

    layer: int
    query: str
    key: str
    value: str
    output: str
    sinks: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.query, self.key, self.value) + (() if self.sinks is None else (self.sinks,))


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a checkpoint as the pieces take it. ``aliases`` are further names of the same tensor (tied weights):
    a checkpoint that has them must have equal numbers there."""

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """What must be known of a model beside its calls. ``vocab_size``, ``context`` (None: it names none) and
    ``eos_token_ids`` are those of its config; ``work`` is what its weights cost, by name (see
    `compiled.model.work_of`). ``verbatim``: transformers takes a checkpoint's tensors as they are."""

    architecture: str
    vocab_size: int
    context: int | None
    eos_token_ids: tuple[int, ...]
    layers: tuple[AttentionSpec, ...]
    work: Mapping[str, float]
    verbatim: bool


@dataclass(frozen=True)
class PieceFacts:
    """What is told of a piece: its graph as text, and the work of one call, where it is known."""

    graph: str
    work: Work | None


@dataclass(frozen=True)
class Recipe:
    """``sources`` says where each value that no call makes comes from; ``output`` is the value of the logits;
    ``held`` describes each tensor of the checkpoint that a source names, ``facts`` each piece, by its key."""

    calls: tuple[Run | Attention, ...]
    sources: Mapping[str, Source]
    constants: tuple[Tensor, ...]
    held: Mapping[str, Held]
    output: str
    model: ModelFacts
    facts: Mapping[str, PieceFacts] = field(default_factory=dict)
