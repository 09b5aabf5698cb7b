"""Which attention a runner has: the one that was asked for, or the best there is for its device and layers."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from compiled.attention import modules
from compiled.attention.base import FP8, Attention, AttentionSpec
from compiled.attention.cpu import CpuAttention, load_kernel
from compiled.attention.layers import ModelAttention, Views
from compiled.attention.reference import ReferenceAttention
from compiled.choices import RunnerOptions, pick_attention
from compiled.device import Device
from compiled.kv_store import KVStore
from compiled.step import LoadError
from compiled.weights import cache_folder

log = logging.getLogger(__name__)

MakeAttention = Callable[[KVStore], ModelAttention]
Scales = Sequence[tuple[float, float]]
"""Of each layer's keys and values; see `Attention`."""


@dataclass(frozen=True)
class Backend:
    """``name``, and in ``reason`` why it is not the one hoped for."""

    name: str
    reason: str
    options: RunnerOptions
    device: Device | None

    @property
    def captures(self) -> bool:
        """Whether a graph of the device may contain it."""
        return self.device is not None and (self.device.name != "cuda" or self.name == "flashinfer")

    def attention(
        self, layers: Sequence[AttentionSpec], dtype: torch.dtype, cache: torch.dtype, scales: Scales | None = None
    ) -> MakeAttention:
        """What makes the attention of ``layers`` over a store, with operands of ``dtype`` and a KV cache of ``cache``,
        which has ``scales`` if it is a float8 one.

        Raises:
            LoadError: it lacks something that there is no substitute for.
        """
        if self.name == "flashinfer":
            return self._flashinfer(layers, dtype, cache, scales)
        if self.name == "cpu" and cache == FP8:
            raise LoadError("kv_dtype fp8_e4m3: attention cpu has no such KV cache, reference and flashinfer have one")
        missing = {spec: CpuAttention.lacks(spec) for spec in layers} if self.name == "cpu" else {}
        if reason := self.reason or next(filter(None, missing.values()), ""):
            log.warning("attention runs in plain PyTorch, which is slow: %s", reason)

        def make(spec: AttentionSpec, views: Views) -> Attention:
            if self.name == "reference" or missing[spec]:
                return ReferenceAttention(spec, views, dtype=dtype, scales=_of(spec, layers, scales))
            return CpuAttention(spec, views, load_kernel(cache_folder() / "kernels"), threads=self.options.threads)

        return lambda store: ModelAttention(layers, store.layers, make)

    def seal(self) -> None:
        """After the warm-up: nothing that it needs may be compiled any more."""
        if self.name == "flashinfer":
            modules.seal()

    def _flashinfer(
        self, layers: Sequence[AttentionSpec], dtype: torch.dtype, cache: torch.dtype, scales: Scales | None
    ) -> MakeAttention:
        # Optional: for machines with a GPU.
        from compiled.attention.flashinfer import FlashInferAttention, Workspace

        for layer, spec in enumerate(layers):
            if missing := FlashInferAttention.lacks(spec, dtype, cache):
                raise LoadError(
                    f"attention flashinfer has no {missing}, which layer {layer} needs; attention reference has, "
                    f"and is slow"
                )
        assert self.device is not None
        names = (str(one).removeprefix("torch.") for one in (dtype, cache))
        arch = ".".join(map(str, torch.cuda.get_device_capability(self.device.torch)))
        how = f"streamengine kernels build --model {self.options.model} --arch {arch}"
        modules.prepare(modules.needed(layers, *names), how=how)
        workspace = Workspace(self.device)

        def make(spec: AttentionSpec, views: Views) -> Attention:
            return FlashInferAttention(spec, views, workspace, dtype=dtype, scales=_of(spec, layers, scales))

        return lambda store: ModelAttention(layers, store.layers, make)


def choose_backend(options: RunnerOptions, device: Device | None) -> Backend:
    """Compiles the CPU's kernel if it is needed and not there. Raises LoadError: see `pick_attention`."""
    asked = options.attention
    if options.eager and asked == "auto":
        asked = "reference"
    return Backend(
        *pick_attention(asked, cache_folder() / "kernels", device.name if device else "cpu"), options, device
    )


def _of(spec: AttentionSpec, layers: Sequence[AttentionSpec], scales: Scales | None) -> Scales | None:
    """Those of the layers that attend by ``spec``, in their order, as `ModelAttention` groups them."""
    return None if scales is None else [scale for one, scale in zip(layers, scales, strict=True) if one == spec]
