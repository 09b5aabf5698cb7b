"""What a runner is built from, and what ``auto`` means on this machine. Each impossible choice is refused by name."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled.attention.base import FP8
from compiled.attention.cpu import load_kernel
from compiled.native import KernelUnavailable
from compiled.parameters import DTYPES
from compiled.step import LoadError


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """See `streamengine.EngineConfig`, whose fields of the same names these are.

    ``graphs`` is for benchmarks; ``shared_kv`` lays the KV cache where other processes can map it.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    eager: bool = False
    attention: str = "auto"
    threads: int = 1
    page_size: int = 16
    kv_pages: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    graphs: bool = True
    shared_kv: bool = False
    offline: bool = False


def pick_device(asked: str) -> str:
    """``auto`` is ``cuda`` where torch sees such a device and FlashInfer is installed, else ``cpu``.

    Raises:
        LoadError: there is no such device.
    """
    if asked == "auto":
        return "cpu" if no_cuda() or no_flashinfer() else "cuda"
    if asked == "cuda" and (reason := no_cuda()):
        raise LoadError(f"device cuda: {reason}")
    return asked


def no_cuda() -> str | None:
    """Why there is no CUDA device, in words."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"


def no_flashinfer() -> str | None:
    """Why there is no FlashInfer, in words."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; get it with: pip install flashinfer-python"
    return None


def pick_dtype(asked: str, device: str = "cpu") -> torch.dtype:
    """``auto`` is bfloat16 on a GPU, and where the CPU multiplies it natively; elsewhere it would be emulated."""
    if asked == "auto":
        able = torch.cpu.get_capabilities()
        native = device == "cuda" or able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16")
        asked = "bfloat16" if native else "float32"
    return DTYPES[asked]


def pick_attention(asked: str, kernels: Path, device: str = "cpu") -> tuple[str, str]:
    """The backend that would be used, and the reason where it is not the one hoped for.

    Raises:
        LoadError: the one asked for does not run on ``device``.
    """
    if asked == "reference":
        return "reference", ""
    if device == "cuda":
        if asked == "cpu":
            raise LoadError("attention cpu runs on the CPU; on device cuda there are flashinfer and reference")
        if reason := no_flashinfer():
            raise LoadError(f"attention {asked} on device cuda: {reason}")
        return "flashinfer", ""
    if asked == "flashinfer":
        raise LoadError(f"attention flashinfer runs on device cuda, not on {device}")
    try:
        load_kernel(kernels)
    except KernelUnavailable as error:
        return "reference", str(error)
    return "cpu", ""


def pick_kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """``auto`` is the model's own."""
    return FP8 if asked == "fp8_e4m3" else dtype
