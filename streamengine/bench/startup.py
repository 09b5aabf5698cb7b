"""Seconds from the start of a process to its first token: of the model that was named, and of random ones of one width
and several depths.

Each start is a process of its own, as a user's is: front, core, first token. Cold ones have an empty cache, but for
a checkpoint that was converted; the warm one after it finds what it left. What is in the system's page cache stays.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
from safetensors.numpy import save_file

from streamengine.compose import model_folder, open_engine
from streamengine.config import EngineConfig
from streamengine.errors import StartupError
from streamengine.link import Progress
from streamengine.sampling import SamplingParams

DEPTHS = (4, 8, 16, 32)
WIDTH, INNER, HEADS, VOCABULARY = 256, 704, 4, 1024
STAGES = ("import", "look", "compiler", "describe", "trace", "split", "compile", "load", "expect", "bind", "warmup")
TIMEOUT_S = 600

Show = Callable[[str], None]


def measure(config: EngineConfig, report: Callable[[Progress], None], show: Show) -> dict[str, Any]:
    # A checkpoint that must be converted or downloaded is: that is not what is measured.
    named = msgspec.structs.replace(config, model=model_folder(config, report))
    show("startup   " + " ".join(f"{name:>9}" for name in ("", *STAGES, "token")))
    result: dict[str, Any] = {"model": config.model, "named": _cold_and_warm(named, "named", show), "depths": {}}
    with tempfile.TemporaryDirectory() as place:
        for depth in DEPTHS:
            made = write_model(Path(place) / str(depth), depth)
            small = msgspec.structs.replace(config, model=str(made), kv_pages=128, max_model_len=256)
            result["depths"][depth] = _cold_and_warm(small, f"{depth} layers", show)
    compiled = {depth: _compiling(both["cold"]) for depth, both in result["depths"].items()}
    ratio = compiled[32] / compiled[8]
    show(f"startup   trace, split and compile of 32 layers take {ratio:.2f} times as long as those of 8")
    return {**result, "ratio_32_to_8": ratio}


def write_model(folder: Path, depth: int) -> Path:
    """A random llama of ``depth`` layers with a tokenizer."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": depth,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    square, wide, narrow = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    for layer in range(depth):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": square for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": wide for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": narrow}
        shapes |= {f"{name}.{part}_layernorm.weight": (WIDTH,) for part in ("input", "post_attention")}
    random = np.random.default_rng(0)
    weights = {name: (random.standard_normal(shape) * 0.05).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w1"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return folder


def _cold_and_warm(config: EngineConfig, name: str, show: Show) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as cache:
        found = {}
        for kind in ("cold", "warm"):
            seconds = found[kind] = _start(config, cache)
            cells = (seconds.get(stage) for stage in (*STAGES, "first_token"))
            row = " ".join("        –" if cell is None else f"{cell:9.2f}" for cell in cells)
            show(f"{name:>9} {kind:>9} {row}")
    return found


def _start(config: EngineConfig, cache: str) -> dict[str, float]:
    """Seconds of each stage of a fresh process, up to its first token."""
    script = "from streamengine.bench.startup import start; start()"
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", script, msgspec.json.encode(config).decode(), str(began)],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise StartupError(f"a start failed: {next(reversed(done.stderr.strip().splitlines()), '')}", param="model")
    told: dict[str, float] = json.loads(done.stdout)
    return told


def start() -> None:
    """One start, measured from the time that is given; run in a process of its own."""
    config, began = msgspec.json.decode(sys.argv[1], type=EngineConfig), float(sys.argv[2])
    print(json.dumps(anyio.run(_first_token, config, began)))  # noqa: T201 - to `_start`


async def _first_token(config: EngineConfig, began: float) -> dict[str, float]:
    async with open_engine(config) as engine:
        ready = time.time() - began
        await engine.generate(token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=1, temperature=0))
        token = time.time() - began
        facts = await engine.statistics()
    names = {stage: f"runner_{stage}_seconds" for stage in STAGES}
    seconds = {stage: facts[name] for stage, name in names.items() if name in facts}
    return {**seconds, "ready": ready, "first_token": token}


def _compiling(seconds: dict[str, float]) -> float:
    return sum(seconds[stage] for stage in ("trace", "split", "compile"))
