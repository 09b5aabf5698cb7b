"""FlashInfer's own Python, in the oldest and the newest version that is supported, over an emulation of its kernels.

So the order of arguments, the rules of graph buffers and what changes between versions are seen without a GPU. On one,
test_conformance.py runs the kernels.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from compiled.attention.base import FP8, AttentionSpec
from compiled.attention.flashinfer import FlashInferAttention, Workspace
from compiled.attention.staged import Stage
from compiled.attention.tables import Plan, make_plan
from compiled.gpu.recording import Recording
from tests.compiled.backends import EMULATED
from tests.compiled.paged import int32

ROOT = Path(__file__).resolve().parent.parent.parent
VERSIONS = ("0.6.18.post1", "0.7.4")
FOLDER = ROOT / ".flashinfer"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wrappers_of_this_version_do_what_the_contract_says(version: str, tmp_path: Path) -> None:
    folder = FOLDER / version
    if not (folder / ".installed").is_file():
        pytest.skip(f"flashinfer {version} is not in .flashinfer; `make flashinfer` puts it there")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "sdk"))),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "OMP_NUM_THREADS": "1",
        EMULATED: "1",
    }
    modules = ("test_conformance.py", "flashinfer_cases.py", "flashinfer_graph_cases.py")
    cases = [f"tests/compiled/{module}" for module in modules]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", "flashinfer"]
    command = [sys.executable, "-m", "pytest", *options, *cases]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout, ran.stdout[-2000:]


def spec(**changes: object) -> AttentionSpec:
    return AttentionSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"sinks": True}, r"sinks \(the wrappers take them, and the fa2 kernels ignore them\)"),
        ({"value_dim": 32}, "values of 32 beside keys of 64"),
        ({"head_dim": 80}, r"head_dim 80 \(only 64, 128, 256\)"),
        ({"scale": -1.0}, r"scale -1.0 \(it must be positive\)"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(changes: dict[str, object], missing: str) -> None:
    wanted = spec(**changes)
    shapes = [(4, 16, 2, size) for size in (wanted.head_dim, wanted.value_size)]
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    with pytest.raises(ValueError, match=f"flashinfer attention has no {missing}"):
        FlashInferAttention(wanted, [(keys, values)], Workspace(Recording(), 1024))


def test_what_the_kernels_cannot_read_is_refused_by_name() -> None:
    workspace = Workspace(Recording(), 1024)
    cache = torch.zeros(4, 16, 2, 64)
    with pytest.raises(ValueError, match=r"no operands of torch\.float32"):
        FlashInferAttention(spec(), [(cache, cache)], workspace)
    small = cache.to(FP8)
    with pytest.raises(ValueError, match=r"no operands of torch\.float32"):
        FlashInferAttention(spec(), [(small, small)], workspace, dtype=torch.float32, scales=[(1.0, 1.0)])
    assert FlashInferAttention.lacks(spec(), torch.float16, torch.bfloat16) == (
        "KV cache of torch.bfloat16 for operands of torch.float16"
    )
    assert FlashInferAttention.lacks(spec(), torch.bfloat16, FP8) is None


def a_plan(rows: list[tuple[int, int]], page_size: int) -> Plan:
    """(query tokens, positions) of each row."""
    counts = [-(-positions // page_size) for _, positions in rows]
    total = sum(counts)
    tables = (
        int32([0, *accumulate(tokens for tokens, _ in rows)]),
        int32([0, *accumulate(counts)]),
        torch.randperm(total, dtype=torch.int32),
        int32([(positions - 1) % page_size + 1 for _, positions in rows]),
    )
    return make_plan(*tables, pages=total, page_size=page_size)


def test_a_step_s_tables_are_staged_whatever_the_sizes_and_places_of_the_steps_before() -> None:
    device = Recording()
    stage = Stage(device)
    steps = [[(1, 1)], [(7, 20), (1, 300_000)], [(2, 2), (3, 50), (1, 17)], [(1, 17)] * 9, [(1, 600_000)]]
    for page_size, rows in zip((16, 1, 16, 4, 1), steps, strict=True):
        plan = a_plan(rows, page_size)
        staged = stage.put(plan, page_size)
        assert stage.put(plan, page_size) is staged
        for name in ("kv_indptr", "kv_last_page_len", "kv_indices"):
            assert torch.equal(getattr(staged, name), getattr(plan, name))
        places = [
            (int(plan.kv_indices[plan.kv_indptr[row] + position // page_size]), position % page_size)
            for row, (tokens, positions) in enumerate(rows)
            for position in range(positions - tokens, positions)
        ]
        assert list(zip(staged.pages.tolist(), staged.slots.tolist(), strict=True)) == places
        assert staged.pages.data_ptr() % 16 == staged.slots.data_ptr() % 16 == 0
    device.synchronize()  # raises where memory was rewritten under way


def test_the_tables_of_a_graph_lie_where_they_lay_and_do_not_grow() -> None:
    stage = Stage(Recording(), tokens=3, rows=3, indices=9)
    places = set()
    for lengths in ((1, 1, 1), (48, 48, 48), (1, 40, 17)):
        staged = stage.put(a_plan([(1, length) for length in lengths], 16), 16)
        assert staged.room.numel() == 9
        places.add(tuple(table.data_ptr() for table in (staged.pages, staged.slots, staged.kv_indptr, staged.room)))
    assert len(places) == 1
    with pytest.raises(ValueError, match=r"a plan of \d+ bytes in a block of 128"):
        stage.put(a_plan([(1, 64), (1, 64), (1, 64)], 16), 16)


WRITES = """
import torch
from compiled.attention.base import FP8
from compiled.attention.write import write
from compiled.attention.write_kernel import launch

pages, slots = torch.tensor([1, 2, 6, 3]), torch.tensor([0, 5, 15, 3])
for dtype, cache in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, FP8)):
    k, _, v = torch.randint(-8, 9, (4, 9, 64)).to(dtype).split(3, 1)  # float8 numbers, or far beyond
    k = k * 1000
    blocks = [torch.zeros(7, 2, 16, 3, 64).to(cache) for _ in range(2)]
    for function, block in zip((write, launch), blocks):
        function((k, v), block.unbind(1), pages, slots, (0.5, 2.0))
    assert torch.equal(*(block.view(torch.uint8) for block in blocks)), (dtype, cache)
    assert blocks[0].float().abs().sum() > 0
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: torch brings it for GPUs only")
def test_the_kernel_that_writes_to_the_cache_writes_what_plain_pytorch_writes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", WRITES], cwd=ROOT, env=environment, check=True, timeout=100)
