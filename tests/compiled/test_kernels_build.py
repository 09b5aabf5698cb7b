"""FlashInfer's modules: which ones a model needs, and how they are built where there is no GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled import provision
from compiled.attention import modules, prebuild
from compiled.attention.base import AttentionSpec
from compiled.attention.modules import Built, Module
from compiled.attention.prebuild import Answer, Toolchain
from compiled.choices import RunnerOptions
from compiled.step import LoadError
from tests.compiled import tiny

ROOT = Path(__file__).resolve().parents[2]
BF16 = ("bfloat16", "bfloat16")

FAKE = {
    "__init__.py": "",
    "jit/__init__.py": "",
    "jit/core.py": """
        import os, pathlib
        CACHE = pathlib.Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", "."))
        class JitSpec:
            def __init__(self, name):
                self.name = name
                self.jit_library_path = CACHE / f"{name}.so"
                self.is_compiled = False
                self.aot_path = pathlib.Path(__file__).parents[1] / "data" / "aot" / name / f"{name}.so"
                self.is_aot = self.aot_path.exists()
            def build_and_load(self):
                if "FLASHINFER_DISABLE_JIT" in os.environ:
                    raise RuntimeError("JIT compilation is disabled via FLASHINFER_DISABLE_JIT")
                self.build(need_lock=True)
            def build(self, need_lock):
                assert need_lock and "FLASHINFER_DISABLE_JIT" not in os.environ
                if "256" in self.name:
                    raise RuntimeError("Ninja build failed. Ninja output:\\nnvcc -DX\\nk.cu(3): error: no such tile")
                self.jit_library_path.write_text(f"{self.name} for {os.environ.get('FLASHINFER_CUDA_ARCH_LIST')}")
    """,
    "prefill.py": """
        from flashinfer.jit.core import JitSpec
        def get_batch_prefill_module(backend, *arguments):
            return JitSpec("_".join(map(str, (backend, *arguments))).replace("torch.", "")).build_and_load()
    """,
}
"""A FlashInfer as far as it is asked, whose compiler writes one line."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the fake FlashInfer looks for modules; CUDA's compiler is a script beside it."""
    site = tmp_path / "site"
    for name, text in FAKE.items():
        path = site / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (site / "flashinfer_python-9.9.dist-info").mkdir()
    (site / "flashinfer_python-9.9.dist-info" / "METADATA").write_text("Name: flashinfer-python\nVersion: 9.9\n")
    make_executable(tmp_path / "cuda" / "bin" / "nvcc", "echo compute_80 compute_90")
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "include" / "cuda_runtime.h").touch()
    make_executable(tmp_path / "tools" / "ninja", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(modules.DISABLE, "1")
    monkeypatch.syspath_prepend(site)
    yield site / "flashinfer" / "data" / "aot"
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


def make_executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def spec(head_dim: int = 64, *, window: int | None = None, soft_cap: float | None = None) -> AttentionSpec:
    return AttentionSpec(4, 2, head_dim, 0.125, window, soft_cap=soft_cap)


def spec_name(head_dim: int) -> str:
    """The fake's, of a module without window and cap."""
    return f"fa2_bfloat16_bfloat16_bfloat16_int32_{head_dim}_{head_dim}_0_False_False_False"


def ignore(phase: str, done: float, total: float) -> None: ...


def test_layers_that_run_in_the_same_kernel_need_one_module() -> None:
    layers = [spec(), spec(window=8), AttentionSpec(8, 8, 64, 1.0), spec(window=4096), spec(soft_cap=50.0)]
    assert modules.needed(layers, *BF16) == (
        Module(64, *BF16),
        Module(64, *BF16, soft_cap=True),
        Module(64, *BF16, window=True),
    )


def test_a_models_own_layers_decide_and_its_weights_are_not_needed(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "gemma2", head_dim=64, query_pre_attn_scalar=64)
    (folder / "model.safetensors").unlink()
    options = RunnerOptions(model=str(folder), kv_dtype="fp8_e4m3", offline=True)
    both = ("bfloat16", "float8_e4m3fn")
    assert provision.needed(options, ignore) == (
        Module(64, *both, window=False, soft_cap=True),
        Module(64, *both, window=True, soft_cap=True),
    )
    with pytest.raises(LoadError, match="no attention for dtype float32"):
        provision.needed(RunnerOptions(model="nonesuch", dtype="float32"), ignore)


def test_an_eight_bit_cache_is_another_module() -> None:
    assert modules.needed([spec(128)], "bfloat16", "float8_e4m3fn") == (Module(128, "bfloat16", "float8_e4m3fn"),)


@pytest.mark.parametrize(
    ("layer", "dtypes", "complaint"),
    [
        (spec(80), BF16, "head_dim 80"),
        (AttentionSpec(4, 2, 64, 0.125, sinks=True), BF16, "sinks"),
        (AttentionSpec(4, 2, 128, 0.125, value_dim=64), BF16, "values of 64"),
        (spec(), ("float32", "float32"), "dtype float32"),
        (spec(), ("bfloat16", "int8"), "kv_dtype int8"),
    ],
)
def test_what_flashinfer_has_no_kernel_for_is_refused_by_name(
    layer: AttentionSpec, dtypes: tuple[str, str], complaint: str
) -> None:
    with pytest.raises(LoadError, match=complaint):
        modules.needed([layer], *dtypes)


def test_modules_are_built_in_place_once_and_again_for_another_gpu(fake: Path) -> None:
    wanted = [Module(64, *BF16), Module(128, *BF16, window=True)]
    seen: list[tuple[str, float, float]] = []
    built = prebuild.build(wanted, "8.0 9.0a", None, lambda *told: seen.append(told))
    name = spec_name(64)
    assert [answer.name for answer in built] == [name, name.replace("64", "128").replace("0_False", "0_True", 1)]
    libraries = [fake / answer.name / f"{answer.name}.so" for answer in built]
    assert [answer.library for answer in built] == [str(library) for library in libraries]
    assert libraries[0].read_text() == f"{name} for 8.0 9.0a"
    assert seen == [("kernels", 0, 2), ("kernels", 1, 2), ("kernels", 2, 2)]
    assert (libraries[0], Built("9.9", "8.0 9.0a")) in modules.list_built(fake)
    Built("9.9", "9.0a").write(libraries[0])
    again = prebuild.build(wanted, "9.0a", None, ignore)
    assert again[0].seconds == 0 and again[1].seconds > 0
    assert "for 9.0a" in libraries[1].read_text()


def test_a_module_that_does_not_compile_is_told_with_the_compilers_error_and_leaves_nothing(
    fake: Path, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=r"k\.cu\(3\): error: no such tile"):
        prebuild.build([Module(256, *BF16)], "9.0a", tmp_path / "out", ignore)
    assert list((tmp_path / "out").rglob("*")) == []


def test_modules_are_named_without_being_built_or_loaded(fake: Path) -> None:
    assert prebuild.look([Module(64, *BF16)]) == [Answer(spec_name(64), None)]
    assert not fake.exists()


def test_a_start_compiles_what_is_missing_and_nothing_afterwards(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(modules.DISABLE)
    assert modules.prepare([Module(64, *BF16)], how="so") == [spec_name(64)]
    modules.seal()
    with pytest.raises(RuntimeError, match="JIT compilation is disabled"):
        modules.spec_of(Module(128, *BF16)).build_and_load()
    assert modules.prepare([Module(128, *BF16)], how="so") == [spec_name(128)], "another start in this process"
    with pytest.raises(LoadError, match=r"no such tile.*; build it: streamengine kernels build"):
        modules.prepare([Module(256, *BF16)], how="streamengine kernels build")


def test_a_start_compiles_nothing_where_the_user_forbids_it(fake: Path) -> None:
    with pytest.raises(LoadError, match=r"missing and cannot be compiled here \(JIT compilation is disabled"):
        modules.prepare([Module(64, *BF16)], how="so")


@pytest.mark.parametrize(
    ("built", "complaint"),
    [
        (Built("9.8", "9.0a"), r"was built by flashinfer 9\.8, 9\.9 is installed"),
        (Built("9.9", "10.0a"), r"was built for 10\.0a, this GPU is 9\.0"),
    ],
)
def test_a_module_for_another_flashinfer_or_gpu_is_refused_at_the_start(
    fake: Path, built: Built, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    library = fake / spec_name(64) / f"{spec_name(64)}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert modules.prepare([Module(64, *BF16)], how="so") == [], "nothing is known of it"
    built.write(library)
    with pytest.raises(LoadError, match=complaint):
        modules.prepare([Module(64, *BF16)], how="so")
    Built("9.9", "8.0 9.0a").write(library)
    assert modules.prepare([Module(64, *BF16)], how="so") == []


@pytest.mark.parametrize(
    ("arch", "complaint"),
    [("sm_90", "like 9.0a"), ("9.0a,10.0a", "like 9.0a"), ("10.0a", "10.0a is not known"), ("", "arch is empty")],
)
def test_an_architecture_that_nvcc_does_not_know_is_refused_before_anything_is_compiled(
    fake: Path, arch: str, complaint: str
) -> None:
    with pytest.raises(LoadError, match=complaint):
        prebuild.build([Module(64, *BF16)], arch, None, ignore)
    assert not fake.exists()


def test_all_that_is_missing_of_a_toolchain_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuild, "_cuda_home", lambda: None)
    monkeypatch.setattr(prebuild, "_ninja", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LoadError, match=r"no CUDA's compiler .* no ninja .* no a C\+\+ compiler"):
        Toolchain.find()


def test_a_folder_that_the_environment_names_is_not_replaced_by_another(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Toolchain.find().cuda_home == tmp_path / "cuda"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    with pytest.raises(LoadError, match=rf"no CUDA's compiler .* in {tmp_path}/gone"):
        Toolchain.find()


def test_what_builds_ends_with_who_asked(fake: Path, tmp_path: Path) -> None:
    """Even if that is killed: the fake's compiler would go on for ever."""
    core = fake.parents[1] / "jit" / "core.py"
    core.write_text(core.read_text().replace("assert need_lock", "__import__('time').sleep(3600); assert need_lock"))
    question = json.dumps({"modules": [vars(Module(64, *BF16))], "out": str(tmp_path), "built": {}})
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{fake.parents[2]}"}
    del env[modules.DISABLE]
    command = (sys.executable, "-m", "compiled.attention.prebuild", question)
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=60) == -signal.SIGKILL


def test_without_flashinfer_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install 'streamengine\[cuda\]'"):
        prebuild.build([Module(64, *BF16)], "9.0a", None, ignore)


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("8.0", (8, 9), True),
        ("8.9", (8, 0), False),
        ("8.0 9.0a", (9, 0), True),
        ("12.0f", (12, 1), True),
        ("12.0a", (12, 1), False),
    ],
)
def test_machine_code_runs_on_its_own_major_version_and_on_no_earlier_minor_one(
    archs: str, capability: tuple[int, int], runs: bool
) -> None:
    assert modules.fits(archs, capability) is runs


def test_a_note_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    (tmp_path / modules.BUILT).write_text("[")
    assert Built.read(tmp_path / "x.so") == Built()


def real_flashinfer() -> list[Path]:
    """Folders with a FlashInfer: those that `make flashinfer` makes."""
    found = sorted((ROOT / ".flashinfer").glob("*"))
    if not found:
        pytest.skip("no FlashInfer in .flashinfer: make flashinfer")
    return found


def ask_real(site: Path, call: str) -> Any:
    """What ``call`` of `prebuild` answers with the FlashInfer in ``site``, in a process of its own."""
    script = f"""
        import dataclasses, json
        from pathlib import Path
        from compiled.attention import prebuild
        from compiled.attention.modules import Module
        print(json.dumps([dataclasses.asdict(one) for one in prebuild.{call}]))
    """
    env = {name: value for name, value in os.environ.items() if name != modules.DISABLE}
    env["PYTHONPATH"] = f"{ROOT}:{site}"
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_flashinfer_names_the_modules_that_its_own_wrappers_would_ask_for() -> None:
    for site in real_flashinfer():
        plain, other = ask_real(
            site,
            "look([Module(64, 'bfloat16', 'bfloat16'), Module(128, 'bfloat16', 'float8_e4m3fn', True, True)])",
        )
        assert plain["name"].startswith(
            "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
            "head_dim_qk_64_head_dim_vo_64_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
        )
        assert "dtype_kv_e4m3" in other["name"] and "use_swa_True_use_logits_cap_True" in other["name"]
        assert plain["library"] is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_module_is_built_without_a_gpu_and_asks_for_nothing_but_cudas_runtime(tmp_path: Path) -> None:
    site = real_flashinfer()[-1]
    try:
        Toolchain.find()
    except LoadError as error:
        pytest.skip(str(error))
    (built,) = ask_real(
        site, f"build([Module(64, 'bfloat16', 'bfloat16')], '9.0a', Path({str(tmp_path)!r}), lambda *_: None)"
    )
    library = built["library"]
    exported = subprocess.run(["nm", "-D", "--defined-only", library], text=True, capture_output=True, check=True)
    functions = set(re.findall(r" T __tvm_ffi_(\w+)", exported.stdout))
    assert {"plan", "paged_run"} <= functions
    dynamic = subprocess.run(["readelf", "-d", library], text=True, capture_output=True, check=True).stdout
    needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.*)\]", dynamic)}
    assert needed <= {"libcudart", "libstdc++", "libm", "libgcc_s", "libc"}, needed
    assert b"sm_90a" in Path(library).read_bytes()
