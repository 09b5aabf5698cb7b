"""How large the KV cache is: steps are rehearsed on a small one, and what they leave of the memory is for pages."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from compiled import selfcheck
from compiled.build import Built
from compiled.choices import RunnerOptions
from compiled.device import Device
from compiled.kv_store import SHARE_OF_DEVICE_MEMORY, SHARE_OF_FREE_MEMORY, KVShape, KVStore, LayerShape, size_pool
from compiled.memory import available_memory, peak_of
from compiled.rehearsal import RANKED, WHOLE, full_step
from compiled.step import Runner, Step


class LocalRunner(Runner, Protocol):
    """A runner in this process, which can be looked into."""

    def allocate(self, store: KVStore) -> None:
        """Use ``store`` from now on; no step is in flight."""
        ...

    def note(self, **facts: float) -> None:
        """Add to what `statistics` tells."""
        ...

    def logits(self, step: Step) -> Tensor:
        """Logits ``[R, V]`` of the rows that sample, then of those that score, without sampling."""
        ...

    def check(self, expected: selfcheck.Expected) -> selfcheck.Check:
        """Raises LoadError where the logits are not the expected ones."""
        ...

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages that nobody owns with NaN: a read of what was not written since shows in ``broken_rows``."""
        ...


def allocate(
    runner: LocalRunner, model: Built, options: RunnerOptions, dtype: torch.dtype, device: Device | None
) -> None:
    """Give ``runner`` as many pages of ``dtype`` as were asked for, or as there is memory for.

    Raises:
        LoadError: there is not enough.
    """
    shape = _shape(model, options.page_size, dtype)
    most = (options.page_size, options.max_num_seqs, options.max_num_batched_tokens)
    few = 1 + options.max_num_seqs + options.max_num_batched_tokens // options.page_size
    runner.allocate(KVStore(shape, few, device))
    step = full_step(*most, WHOLE if device is None else RANKED)
    measure = peak_of if device is None else device.peak_of
    step_bytes = measure(lambda: runner.submit(step).wait())
    if device is not None:
        # Graphs, and code that is loaded to the device: what is free now is free when serving. Graphs of whole passes
        # have the addresses of these few pages, and are captured anew over those that there will be.
        runner.warmup()
    pages = size_pool(
        shape,
        asked=options.kv_pages,
        wanted_tokens=options.max_num_seqs * model.spec.max_model_len,
        max_model_len=model.spec.max_model_len,
        free=_free(device),
        reserved=step_bytes,
    )
    runner.allocate(KVStore(shape, pages, device, shared=options.shared_kv))
    runner.note(threads=options.threads, step_bytes=step_bytes)


def _shape(model: Built, page_size: int, dtype: torch.dtype) -> KVShape:
    layers = tuple(LayerShape(spec.num_kv_heads, spec.head_dim, spec.value_size) for spec in model.layers)
    windows = {spec.window for spec in model.layers}
    return KVShape(layers, page_size, dtype, windows.pop() if len(windows) == 1 else None)


def _free(device: Device | None) -> int:
    if device is None or device.torch.type == "cpu":
        return int(available_memory() * SHARE_OF_FREE_MEMORY)
    return int(device.free_memory() * SHARE_OF_DEVICE_MEMORY)


def free_for_pages(device: str) -> dict[str, int]:
    """What is free on ``device`` ("cuda" or the CPU), and how much of it may be pages, in bytes; without a step's."""
    if device == "cuda":
        free, share = torch.cuda.mem_get_info()[0], SHARE_OF_DEVICE_MEMORY
    else:
        free, share = available_memory(), SHARE_OF_FREE_MEMORY
    return {"memory_available_bytes": free, "kv_memory_bytes": int(free * share)}
