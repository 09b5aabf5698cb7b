"""From a model's folder to a forward pass: what is done at once, what is found again, and that all ways are equal."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from compiled import build, cold, inductor, pieces
from compiled.build import BuildOptions
from compiled.parameters import read_directly
from compiled.recipe import Held
from compiled.runner import LocalRunner, RunnerOptions, build_runner
from compiled.step import LoadError, Row, Sampling, Step
from tests.compiled import caches, tiny
from tests.compiled.test_unroll import MODELS

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "page_size": 4, "kv_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these tests, but with the kernels that this machine has."""
    home = tmp_path_factory.getbasetemp() / "cache"
    if not home.exists():
        caches.apart(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))


def run(folder: Path, options: BuildOptions = build.FAST, **changes: Any) -> torch.Tensor:
    runner = build_runner(RunnerOptions(model=str(folder), **(OPTIONS | changes)), lambda *_: None, build=options)
    return logits(runner)


def logits(runner: LocalRunner) -> torch.Tensor:
    """Of a prompt in two chunks and of a token behind it, beside another row."""
    prompt, pages = tuple(range(3, 22)), tuple(range(1, 7))
    steps = (
        (Row(0, prompt[:9], 0, pages), Row(1, (5, 7), 0, (9,), Sampling())),
        (Row(0, prompt[9:], 9, pages, Sampling()), Row(1, (11,), 2, (9,), Sampling())),
        (Row(0, (40,), 19, pages, Sampling()),),
    )
    return torch.cat([runner.logits(Step(number, rows)) for number, rows in enumerate(steps)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "deepseek_v3"])
def test_layers_of_a_kind_and_all_layers_traced_give_the_same_bits(kind: str, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, kind, **MODELS[kind])
    unrolled = run(folder)
    assert torch.equal(unrolled, run(folder, BuildOptions(compose=False)))
    assert torch.allclose(unrolled, run(folder, eager=True), atol=1e-4)


@pytest.mark.slow
def test_the_checkpoint_is_read_while_the_code_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def read(*arguments: Any) -> Any:
        began.set()
        return read_directly(*arguments)

    def compile_pieces(*arguments: Any) -> Any:
        assert began.wait(20)
        return pieces.compile_pieces(*arguments)

    monkeypatch.setattr(build, "read_directly", read)
    monkeypatch.setattr(cold, "compile_pieces", compile_pieces)
    run(tiny.make(tmp_path, "llama", rms_norm_eps=2e-5))
    assert began.is_set()


def test_what_inductor_trips_over_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(*_: Any) -> Any:
        raise RuntimeError("Pending unbacked symbols\nfor more help")

    monkeypatch.setattr(inductor, "write", trip)
    with pytest.raises(LoadError, match=r"^\S.* cannot be compiled: Pending unbacked symbols; use --eager"):
        run(tiny.make(tmp_path, "llama", rms_norm_eps=3e-5))


def test_a_second_start_needs_neither_transformers_nor_a_compiler(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama")
    first = run(folder)
    script = f"""
import json, sys
from compiled.runner import RunnerOptions, build_runner
from compiled.step import Row, Sampling, Step
runner = build_runner(RunnerOptions(model={str(folder)!r}, **{OPTIONS!r}), lambda *_: None)
runner.warmup()
step = Step(0, (Row(0, (40, 41), 0, (1,), Sampling()),))
names = [name for name in ("transformers", "torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
print(json.dumps([names, runner.logits(step).tolist()]))
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    names, got = json.loads(told.stdout)
    assert names == []
    assert len(got[0]) == first.shape[1]


@pytest.mark.slow
def test_a_second_start_of_a_model_whose_experts_are_merged_on_load_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.make(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert any(".experts.3." in name for name in file.keys())  # noqa: SIM118 - it is no mapping
    first = run(folder)
    monkeypatch.setattr(build, "_compile", None)
    assert torch.equal(run(folder), first)
    monkeypatch.undo()
    assert torch.allclose(first, run(folder, eager=True), atol=1e-4)


HELD = {"model.a.weight": Held((2, 3), "bfloat16", ("head.weight",)), "model.b": Held((4,), "float32")}
TENSORS = {"model.a.weight": torch.ones(2, 3), "model.b": torch.zeros(4)}


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(dict(tensors), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "rename", [lambda name: name, lambda name: name.removeprefix("model.")], ids=["as they are", "without the head"]
)
def test_tensors_are_read_by_their_names_and_cast(rename: Callable[[str], str], tmp_path: Path) -> None:
    found = read_directly(write(tmp_path, {rename(name): tensor for name, tensor in TENSORS.items()}), HELD)
    assert found is not None
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        "model.a.weight": (torch.bfloat16, torch.ones(2, 3).tolist()),
        "model.b": (torch.float32, [0.0] * 4),
    }


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.a.weight": torch.ones(2, 3)},
        TENSORS | {"model.b": torch.zeros(5)},
        TENSORS | {"model.b": torch.zeros(1, 4)},
    ],
    ids=["one is missing", "one is longer", "one has another rank"],
)
def test_a_checkpoint_that_is_not_as_expected_is_left_to_transformers(
    tensors: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    assert read_directly(write(tmp_path, tensors), HELD) is None


def test_several_files_are_those_of_the_index(tmp_path: Path) -> None:
    safetensors.torch.save_file({"model.a.weight": torch.ones(2, 3)}, tmp_path / "model-1.safetensors")
    safetensors.torch.save_file({"model.b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    safetensors.torch.save_file({"model.b": torch.ones(4)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"model.a.weight": "model-1.safetensors", "model.b": "model-2.safetensors"}}
    assert read_directly(tmp_path, HELD) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_directly(tmp_path, HELD)
    assert found is not None and not found["model.b"].any()


def test_tied_weights_that_differ_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    same = write(tmp_path, TENSORS | {"head.weight": torch.ones(2, 3)})
    assert read_directly(same, HELD) is not None
    with pytest.raises(LoadError, match=r"says that model\.a\.weight and head\.weight are one, and they differ"):
        read_directly(write(tmp_path, TENSORS | {"head.weight": torch.zeros(2, 3)}), HELD)
