"""A model's pieces become code for a GPU, on a machine that has none. That the code runs is for tests/gpu to show."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled import fuse, inductor, move
from compiled.recipe import Parameter
from compiled.split import Split, key_of
from compiled.stopwatch import Stopwatch
from compiled.unroll import split_model
from tests.compiled import tiny

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / ".triton"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Split:
    from compiled import cold  # imports transformers

    described = cold.describe(tiny.make(tmp_path_factory.mktemp("model"), "llama"), torch.float32, None)
    return split_model(described.module, described.choice, described.buffers, Stopwatch())


def test_linears_of_one_input_are_merged_and_their_weights_stay_as_they_are(parts: Split) -> None:
    fused = fuse.fuse(parts, packing=False)
    parameters = [source for source in fused.sources.values() if isinstance(source, Parameter)]
    assert not any(source.packed for source in parameters)
    merged = [tuple(name.split(".")[-2] for name in source.names) for source in parameters if len(source.names) > 1]
    assert sorted(merged) == sorted(2 * [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])


def test_merged_linears_compute_the_same(parts: Split) -> None:
    """Each piece, on numbers of the sizes that it was traced with."""
    fused = fuse.fuse(parts, packing=False)
    source = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {}

    def given(piece: Any, parameters: Any) -> list[Any]:
        found = []
        for name, node in zip(piece.inputs, (n for n in piece.graph.graph.nodes if n.op == "placeholder"), strict=True):
            example = node.meta["example_value"]
            if name not in values and "+" in name:
                values[name] = torch.cat([values[part] for part in parameters[name].names])
            elif name not in values:
                values[name] = number(example)
            found.append(values[name])
        return found

    def number(example: Any) -> Any:
        if not isinstance(example, torch.Tensor):
            return 16
        shape = tuple(int(size) if isinstance(size, int) else 16 for size in example.shape)
        if example.dtype == torch.int64:
            return torch.arange(shape[0]) % 4
        return torch.randn(shape, generator=source, dtype=example.dtype)

    for plain, merged in zip(parts.pieces, fused.pieces, strict=True):
        want = plain.graph(*given(plain, parts.sources))
        got = merged.graph(*given(merged, fused.sources))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want, got, strict=True))


def test_a_moved_graph_names_no_other_device(parts: Split) -> None:
    there = torch.device("cuda", 0)
    moved = move.move(fuse.fuse(parts, packing=False), there)
    assert len(moved.unique) == len(fuse.fuse(parts, packing=False).unique)
    for piece in moved.unique:
        assert piece.key == key_of(piece.graph.graph)
        assert "device(type='cpu')" not in piece.graph.code
        for node in piece.graph.graph.nodes:
            value = node.meta.get("example_value")
            assert not isinstance(value, torch.Tensor) or value.device == there
    assert all(node.device.type == "cpu" for piece in parts.unique for node in examples(piece)), "a copy was moved"


def examples(piece: Any) -> list[torch.Tensor]:
    values = (node.meta.get("example_value") for node in piece.graph.graph.nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]


def lowered(mode: str, folder: Path) -> list[dict[str, Any]]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "sdk"), str(TRITON)])
    script = [sys.executable, "-m", "tests.compiled.lower_for_cuda", mode, str(tiny.make(folder, "llama"))]
    env = os.environ | {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if mode == "interpret" else {})
    told = subprocess.run(script, capture_output=True, text=True, timeout=500, env=env, cwd=ROOT, check=True)
    found: list[dict[str, Any]] = json.loads(told.stdout.splitlines()[-1])
    assert len(found) == 3
    return found


with_triton = pytest.mark.skipif(
    not (TRITON / "triton").exists(), reason="Triton is not there; get it with: make triton"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@with_triton
def test_inductor_writes_triton_kernels_that_are_kept_as_text_and_compile(tmp_path: Path) -> None:
    for piece in lowered("compile", tmp_path):
        source = piece["source"]
        assert source.count("= async_compile.triton(") == piece["triton"] > 2
        assert piece["cpp"] == 0
        assert "empty_strided_cuda(" in source
        assert "extern_kernels.mm(" in source
        assert "streamengine.linear" not in source
        imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
        assert not any("_inductor" in ast.unparse(node) for node in imports)


@pytest.mark.slow
@pytest.mark.timeout(600)
@with_triton
def test_the_code_for_a_gpu_computes_what_the_model_does(tmp_path: Path) -> None:
    """In float32, with Triton's interpreter in place of a GPU, for as many tokens as were traced and for others."""
    for piece in lowered("interpret", tmp_path):
        assert all(0 <= one < 1e-5 for results in piece["differences"] for one in results), piece["name"]


def test_inputs_that_do_not_lie_as_the_kernels_assume_are_copied() -> None:
    """What torch 2.11 does beside the code that it writes, and later ones in it."""
    seen: list[torch.Tensor] = []

    def call(arguments: list[torch.Tensor]) -> tuple[int]:
        seen.extend(arguments)
        arguments.clear()
        return (7,)

    space: dict[str, Any] = {"call": call}
    exec(inductor._ALIGN.format(numbers=(0, 2)), space)
    whole = torch.arange(40.0).view(4, 10)
    given = [whole[:, 1:], whole[:, 1:], whole]
    assert space["call"](list(given)) == (7,)
    assert all(
        torch.equal(one, other) and one.stride() == other.stride() for one, other in zip(seen, given, strict=True)
    )
    assert [one.data_ptr() == other.data_ptr() for one, other in zip(seen, given, strict=True)] == [False, True, True]
    assert seen[0].data_ptr() % 16 == 0
