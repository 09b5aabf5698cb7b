"""What a step goes through on its way to tokens: functions that a profile replaces by ones which measure them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from compiled import batch, sampler
from compiled import logprobs as probabilities
from compiled.attention.layers import ModelAttention
from compiled.batch import Batch
from compiled.profiling import Recorder
from compiled.program import Forward
from compiled.step import Logprob


def plan(attention: ModelAttention, batch: Batch) -> None:
    """Lay the page tables of ``batch`` before ``attention``."""
    attention.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)


@dataclass(frozen=True, slots=True)
class Stages:
    """In order; ``run`` is the forward pass, the others are the host's."""

    run: Forward
    batch: Callable[..., Batch] = batch.build
    plan: Callable[..., None] = plan
    sample: Callable[..., tuple[Tensor, int]] = sampler.sample
    logprobs: Callable[..., Sequence[Logprob | None]] = probabilities.logprobs

    def measured(self, recorder: Recorder) -> "Stages":
        """The same, seen by ``recorder``."""
        hosts = {name: recorder.host(name, getattr(self, name)) for name in HOST}
        return Stages(recorder.forward(), **hosts)


HOST = tuple(field.name for field in fields(Stages) if field.name != "run")
