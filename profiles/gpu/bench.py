"""What sections share: sizes, facts, a device, random checkpoints, and one runner or reference model at a time."""

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compiled.choices import RunnerOptions
from compiled.gpu.buckets import Bucket, Buckets
from compiled.runner import build_runner
from profiles.gpu.sizes import Sizes


class Bench:
    """``facts`` are those of the section that runs."""

    def __init__(self, sizes: Sizes, work: Path) -> None:
        self.sizes = sizes
        self.work = work
        self.facts: dict[str, Any] = {}
        self.device = torch.device("cuda" if sizes.device == "cuda" else "cpu")
        self._runner: tuple[str, Any] | None = None

    def show(self, text: str, **more: Any) -> None:
        print("   " + text.format(**{**self.facts, **more}), flush=True)

    def expect(self, condition: bool, why: str) -> None:
        if not condition:
            raise AssertionError(why)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory of runner and reference back."""
        self._runner = None
        gc.collect()
        if self.device.type == "cuda" and torch.cuda.is_initialized():
            try:
                torch.cuda.empty_cache()
            except RuntimeError:
                return  # its context is broken, which the caller finds out

    def checkpoint(self, which: str) -> Path:
        """The folder of the ``large`` or ``small`` model, with random weights; written once."""
        folder, config = self.work / which, getattr(self.sizes, which)
        if not (folder / "model.safetensors").exists():
            started = time.monotonic()
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
            save_file(random_weights(config, self.device), folder / "unfinished", metadata={"format": "pt"})
            (folder / "unfinished").rename(folder / "model.safetensors")
            self.show(f"{which} checkpoint written in {time.monotonic() - started:.1f} s")
        return folder

    def runner(self, which: str, dtype: str = "bfloat16", **changes: Any) -> Any:
        """A runner that has warmed up. The one of the last call, if it was for the same."""
        wanted = repr((which, dtype, sorted(changes.items())))
        if self._runner is None or self._runner[0] != wanted:
            self.close()
            started = time.monotonic()
            built = build_runner(self.options(which, dtype, **changes), lambda *_: None)
            ready = time.monotonic()
            built.warmup()
            self.facts["build_seconds"] = round(ready - started, 2)
            self.facts["warmup_seconds"] = round(time.monotonic() - ready, 2)
            self.show("built in {build_seconds} s, warm after another {warmup_seconds} s")
            self._runner = (wanted, built)
        return self._runner[1]

    def options(self, which: str, dtype: str, **changes: Any) -> RunnerOptions:
        sizes = self.sizes
        given: dict[str, Any] = {
            "model": str(self.checkpoint(which)),
            "device": sizes.device,
            "dtype": dtype,
            "kv_pages": sizes.kv_pages if which == "large" else None,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "offline": True,
        }
        return RunnerOptions(**{**given, **changes})

    def reference(self, which: str, dtype: torch.dtype) -> Any:
        """transformers' own model with the same weights, uncompiled."""
        from transformers import AutoModelForCausalLM  # slow to import, and some sections do without

        return AutoModelForCausalLM.from_pretrained(
            self.checkpoint(which), dtype=dtype, local_files_only=True, attn_implementation="sdpa"
        ).to(self.device)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.sizes.small["vocab_size"], (length,), generator=random).tolist()


class Launches:
    """Counts the steps that were launched when the device had done all before them: there it had to wait for the
    host. None of it is known on the recording device, which is never busy."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._before: torch.cuda.Event | None = None
        self._steps = self._late = 0

    def count(self) -> None:
        """Right after a step was submitted."""
        if self._cuda:
            self._steps += 1
            self._late += self._before is None or self._before.query()
            self._before = torch.cuda.Event()
            self._before.record()

    @property
    def late_percent(self) -> float | None:
        return 100 * self._late / self._steps if self._steps else None


@contextmanager
def limited(runner: Any, *, whole: bool, pieces: bool) -> Iterator[None]:
    """As if the runner had no graphs of the whole pass, or of pieces."""
    passes = runner.passes
    everything = passes.buckets
    passes.buckets = Buckets(everything.whole if whole else (), everything.pieces if pieces else ())
    try:
        yield
    finally:
        passes.buckets = everything


def capture_all(runner: Any) -> dict[str, float]:
    """Capture every size that there is, also those that a server captures when traffic asks; what that took."""
    passes = runner.passes
    sizes = passes.buckets
    passes.warmup([*(Bucket(size, True) for size in sizes.whole), *(Bucket(size, False) for size in sizes.pieces)])
    told = passes.statistics()
    return {"graphs": told["graphs"], "capture_seconds": told["graph_seconds"], "graph_bytes": told["graph_bytes"]}


def random_weights(config: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """bfloat16, in a trained model's order of magnitude, made on ``device``."""
    random = torch.Generator(device).manual_seed(0)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, generator=random, device=device, dtype=torch.float32) * columns**-0.5
        return made.to(torch.bfloat16).cpu()

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": norm}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": matrix(heads, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
            prefix + "input_layernorm.weight": norm.clone(),
            prefix + "post_attention_layernorm.weight": norm.clone(),
        }
    return weights
