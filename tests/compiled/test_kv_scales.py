"""The factors of a float8 KV cache that checkpoints bring: used by the layer they belong to, or refused by name."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled.kv_scales import read_scales
from compiled.runner import CpuRunner, RunnerOptions, build_runner
from compiled.step import LoadError, Row, Sampling, Step
from tests.compiled import tiny

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
}
SCALES = [(0.125, 0.25), (0.5, 0.0625)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.make(tmp_path, "gemma2")  # its two layers attend differently


def calibrate(folder: Path, scales: dict[str, Any], quantization: dict[str, Any] | None = None) -> Path:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: torch.tensor(value) for name, value in scales.items()}, path, {"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def named(style: str, scales: list[tuple[float, float]] = SCALES) -> dict[str, Any]:
    return {
        f"model.layers.{layer}.{name}": [value] if style == "modelopt" else value
        for layer, pair in enumerate(scales)
        for name, value in zip(NAMES[style], pair, strict=True)
    }


def start(folder: Path, **options: Any) -> CpuRunner:
    fixed: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "page_size": 4, "kv_pages": 20, "eager": True, "kv_dtype": "fp8_e4m3"
    }  # fmt: skip
    runner = build_runner(RunnerOptions(model=str(folder), **(fixed | options)), lambda *_: None)
    assert isinstance(runner, CpuRunner)
    return runner


@pytest.mark.parametrize(("style", "quantization"), [("compressed-tensors", COMPRESSED), ("modelopt", MODELOPT)])
def test_each_layer_has_the_factors_that_the_checkpoint_says(
    folder: Path, style: str, quantization: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "compiled.kv_scales")
    attention = start(calibrate(folder, named(style), quantization))._attention
    of_layers = [attention._groups[group].scales[number] for group, number in attention._places]
    assert of_layers == SCALES
    assert len(attention._groups) == 2
    assert "factors of the float8 KV cache: the checkpoint's, 0.0625 to 0.5" in caplog.text


def test_the_factors_decide_what_is_stored_and_cancel_out_of_what_is_read(tmp_path: Path) -> None:
    step = Step(1, (Row(0, tuple(range(3, 14)), 0, (1, 2, 3), Sampling()),))
    want = start(tiny.make(tmp_path / "plain", "llama"), kv_dtype="auto").logits(step)

    def error(scale: float) -> float:
        folder = tiny.make(tmp_path / str(scale), "llama")
        got = start(calibrate(folder, named("modelopt", [(scale, scale)] * 2), MODELOPT)).logits(step)
        return float((got - want).norm() / want.norm())

    assert error(1.0) < 0.1 and error(0.125) < 0.1
    assert error(1.0) != error(0.3), "what is between two numbers of 8 bits falls on another one"
    assert error(2.0**-12) > 0.3, "most of it is beyond the largest number"


def test_a_factor_for_both_is_both_and_without_any_it_is_1(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "compiled.kv_scales")
    assert read_scales(folder, 2) == [(1.0, 1.0), (1.0, 1.0)]
    assert "the checkpoint has no factors for a float8 KV cache: 1.0 everywhere" in caplog.text
    both = {f"model.layers.{layer}.self_attn.kv_scale": 0.5 + layer for layer in range(2)}
    assert read_scales(calibrate(folder, both), 2) == [(0.5, 0.5), (1.5, 1.5)]


FIRST = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("changes", "quantization", "complaint"),
    [
        ({f"{FIRST}.k_scale": 0.0}, COMPRESSED, f"{FIRST}.k_scale is 0.0; a factor is a positive number"),
        ({f"{FIRST}.k_scale": float("nan")}, COMPRESSED, f"{FIRST}.k_scale is nan"),
        (
            {f"{FIRST}.v_scale": [1.0, 2.0]},
            COMPRESSED,
            r"v_scale has shape \[2\]; there is one number",
        ),
        ({f"{FIRST}.k_proj.k_scale": 1.0}, COMPRESSED, "k_scale is a factor .* but layer 0 has two of them"),
        ({f"{FIRST}.kv_scale": 1.0}, COMPRESSED, "but layer 0 has two of them"),
        ({"model.layers.2.self_attn.k_scale": 1.0}, COMPRESSED, "but the model has 2 layers"),
        ({}, COMPRESSED | {"kv_cache_scheme": SCHEME | {"num_bits": 4}}, "kv_cache_scheme has num_bits 4, not 8"),
        ({}, COMPRESSED | {"kv_cache_scheme": SCHEME | {"dynamic": True}}, "has dynamic True, not False"),
        ({}, COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "head"}}, "has strategy 'head', not 'tensor'"),
        ({}, MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4', not 'FP8'"),
    ],
)
def test_what_is_no_such_factor_is_refused_by_name(
    folder: Path, changes: dict[str, Any], quantization: dict[str, Any], complaint: str
) -> None:
    calibrate(folder, named("compressed-tensors") | changes, quantization)
    with pytest.raises(LoadError, match=f"kv_dtype fp8_e4m3: .*{complaint}"):
        start(folder)
    assert start(folder, kv_dtype="auto").kv.page_bytes, "a cache of the model's own type needs none"


def test_factors_of_some_layers_only_are_refused(folder: Path) -> None:
    scales = named("compressed-tensors")
    del scales["model.layers.1.self_attn.v_scale"]
    with pytest.raises(LoadError, match="but none for layer 1's v"):
        start(calibrate(folder, scales, COMPRESSED))


@pytest.mark.parametrize(
    "weights",
    [
        COMPRESSED | {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        MODELOPT | {"quant_algo": "FP8"},
        {"quant_method": "fp8", "kv_cache_scheme": SCHEME},
    ],
)
def test_weights_of_few_bits_are_refused_as_ever(folder: Path, weights: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="quantized checkpoints are not supported yet"):
        start(calibrate(folder, named("compressed-tensors"), weights), kv_dtype="auto")
