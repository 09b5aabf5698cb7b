"""What a model does that pages cannot hold is found by running its code, and what attention is asked for counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from compiled.attention.base import AttentionSpec
from compiled.probe import probe
from compiled.runner import LocalRunner, build_runner
from compiled.step import LoadError, Row, Sampling, Step
from tests.compiled import caches
from tests.compiled.test_architectures import TOKENS, TOLERANCE, error_of, options, write

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 16,
}


def build(folder: Path, **changes: Any) -> LocalRunner:
    return build_runner(options(folder, **changes), lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mistral", {"window": None}),
        ("mistral", {"window": 9}),
        ("gemma2", {"soft_cap": None}),
        ("gemma2", {"scale": 0.25 * 1.01}),
    ],
    ids=str,
)
def test_the_comparison_notices_attention_that_is_not_what_was_asked_for(
    kind: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*arguments: Any) -> tuple[AttentionSpec, ...]:
        return tuple(replace(spec, **change) for spec in probe(*arguments))

    model = write(kind, tmp_path)
    assert model is not None
    assert error_of(build(tmp_path), model) < TOLERANCE
    monkeypatch.setattr("compiled.model.probe", changed)
    assert error_of(build(tmp_path), model) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama4_text", {"attention_chunk_size": 16}, "chunks of 16 positions.*lower max_model_len from 64 to 16"),
        ("llama4_text", {"floor_scale": 16}, "counts positions by itself.*before position 64"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "is not causal"),
        ("bert", {"is_decoder": False}, "is not causal"),
        ("lfm2", {}, "lets tokens meet outside of its attention"),
        ("roberta", {}, "does not count positions from 0 upwards"),
        ("doge", {}, "builds an attention mask of its own"),
        ("deepseek_v32", {}, "asks its attention for 'indices'"),
        ("moss_transcribe_diarize", {}, "takes no position_ids"),
    ],
    ids=str,
)
def test_what_pages_cannot_hold_is_refused_at_load(
    kind: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write(kind, tmp_path, **changes)
    with pytest.raises(LoadError, match=reason):
        build(tmp_path)


@pytest.mark.parametrize("changes", [{"attention_chunk_size": 16}, {"floor_scale": 16}], ids=str)
def test_what_shows_beyond_the_context_only_is_served(changes: dict[str, Any], tmp_path: Path) -> None:
    model = write("llama4_text", tmp_path, **changes)
    assert model is not None
    runner = build(tmp_path, max_model_len=15)
    tokens = TOKENS[:15]
    got = runner.logits(Step(0, (Row(0, tokens, 0, (3, 1, 4, 2), Sampling()),)))[0]
    with torch.no_grad():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert torch.allclose(got, want, atol=1e-4)


def test_a_hybrid_s_code_is_served_where_all_its_layers_are_attention(tmp_path: Path) -> None:
    model = write("granitemoehybrid", tmp_path, layer_types=["attention", "attention"])
    assert model is not None
    assert error_of(build(tmp_path), model) < TOLERANCE


@pytest.mark.parametrize("limit", [16, 64])
def test_rotary_frequencies_are_those_of_the_context_that_is_served_whoever_shares_the_batch(
    limit: int, tmp_path: Path
) -> None:
    model = write("phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=16)
    assert model is not None
    runner = build(tmp_path, max_model_len=limit)
    tokens = TOKENS[:16] if limit == 16 else TOKENS  # as long as the context has the frequencies that were chosen
    whole = Row(0, tokens, 0, (1, 2, 3, 4, 5)[: -(-len(tokens) // 4)], Sampling())
    got = runner.logits(Step(0, (Row(1, tokens[:3], 0, (9,), Sampling()), whole)))
    with torch.no_grad():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert torch.allclose(got[1], want, atol=1e-4)
    alone = runner.logits(Step(0, (Row(1, tokens[:3], 0, (9,), Sampling()),)))
    assert torch.allclose(got[0], alone[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_read_from_the_names_that_published_checkpoints_have(kind: str, tmp_path: Path) -> None:
    model = write(kind, tmp_path)
    assert model is not None
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(".experts.0." in name for name in file.keys())  # noqa: SIM118 – the file is no mapping
    assert error_of(build(tmp_path), model) < TOLERANCE


def test_a_model_whose_sizes_depend_on_what_is_in_tensors_needs_eager(tmp_path: Path) -> None:
    write("jetmoe", tmp_path)  # how many tokens each expert gets
    with pytest.raises(LoadError, match=r"JetMoe.* needs --eager: sizes in it depend on numbers that are in tensors"):
        build(tmp_path, eager=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_experts_sinks_and_sizes_that_differ_are_compiled(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches.apart(tmp_path / "cache")))
    folder = tmp_path / "model"
    write(kind, folder)
    step = Step(0, (Row(0, TOKENS, 0, (7, 2, 30, 11, 5), Sampling(), targets=TOKENS),))
    want = build(folder, dtype=dtype).logits(step)
    got = build(folder, dtype=dtype, eager=False).logits(step)
    error_R = (got - want).float().abs().amax(dim=-1) / float(want.abs().max())
    if dtype == "float32":
        assert float(error_R.max()) < 1e-4
    else:  # rounding sends single tokens of such small models to another expert
        assert float(error_R.median()) < 5e-2
