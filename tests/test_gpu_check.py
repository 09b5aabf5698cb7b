"""The script for a GPU, run on the CPU: minutes on a device must never be lost to a typo."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from compiled.attention.modules import Built
from profiles import gpu_check, gpu_pack

ROOT = Path(__file__).resolve().parents[1]
MISSING = ("gguf", "llguidance", "prometheus_client", "starlette", "uvicorn", "websockets")
"""Libraries of the server, which a machine for GPU checks need not have."""


def run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({name!r})")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "profiles" / "gpu_check.py"), "--dry-run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, env=env, check=False)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if told["ok"] else 1)
    return told, done.stdout


class Scripted:
    """A child that says what it was told to say; None at its end, an exception for what it raises."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)
        self.ended = False

    def message(self, seconds: float) -> Any:
        told = self._messages.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    def end(self) -> str:
        self.ended = True
        return "exit status 9"


def begins(section: str) -> dict[str, Any]:
    return {"section": section, "state": "begins"}


def ended(section: str, why: str | None = None) -> dict[str, Any]:
    told = {"section": section, "state": "failed" if why else "passed", "seconds": 1.0, "facts": {"of": section}}
    return told | ({"why": why} if why else {})


def checked(monkeypatch: pytest.MonkeyPatch, *children: Scripted, seconds: float = 300) -> gpu_check.Report:
    """What is reported of ``machine``, ``graphs`` and ``decode``, run by ``children`` one after the other."""
    waiting = list(children)
    monkeypatch.setattr(gpu_check, "Child", lambda *given: waiting.pop(0))
    arguments = Namespace(seconds=seconds, sections=["machine", "graphs", "decode"], work=None, path=[], dry_run=True)
    report = gpu_check.check(arguments)
    assert not waiting and all(child.ended for child in children)
    return report


REST = (begins("decode"), ended("decode"))


@pytest.mark.parametrize(
    ("children", "why"),
    [
        ([Scripted(begins("graphs"), ended("graphs", "wrong"), *REST)], "wrong"),
        (
            [
                Scripted(begins("graphs"), ended("graphs", "wrong"), {"section": "graphs", "state": "unusable"}),
                Scripted(*REST),
            ],
            "wrong",
        ),
        ([Scripted(begins("graphs"), None), Scripted(*REST)], "its process ended: exit status 9"),
        ([Scripted(begins("graphs"), TimeoutError()), Scripted(*REST)], "took more than 60 s"),
    ],
    ids=["raises", "breaks the device", "kills its process", "hangs"],
)
def test_a_section_that_fails_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, children: list[Scripted], why: str
) -> None:
    first, *others = children
    first._messages[:0] = [begins("machine"), ended("machine")]
    report = checked(monkeypatch, first, *others)
    assert list(report.failed) == ["graphs"] and report.failed["graphs"].startswith(why)
    assert report.facts["machine"] == {"of": "machine"} and report.facts["decode"] == {"of": "decode"}


def test_what_no_time_is_left_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Scripted(begins("machine"), ended("machine"), begins("graphs"), TimeoutError())
    report = checked(monkeypatch, child, seconds=1)
    assert report.failed["graphs"].startswith("took more than") and report.failed["decode"].startswith("not run")


def test_a_goal_that_nothing_was_measured_for_is_not_met_and_not_missed() -> None:
    report = gpu_check.Report(facts={"decode": {"1": {"percent": 80.0}}, "graphs": {"capture_seconds": 7.0}})
    met = {name: goal["met"] for name, goal in gpu_check.goals(report).items()}
    assert sorted(map(str, met.values())) == ["False", "None", "None", "True"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_section_runs_through_on_the_recording_device(tmp_path: Path) -> None:
    told, output = run(tmp_path)
    assert told["failed"] == {}, output
    assert set(told["facts"]) == set(gpu_check.SECTIONS)
    assert told["device"] == "recording" and "goals" not in told
    assert told["facts"]["float32"]["greedy_tokens_equal"] > 0
    assert told["facts"]["graphs"]["difference"] == {"with": 0, "pieces": 0, "again": 0}
    assert set(told["facts"]["conformance"]["runs"].values()) == {1}


def site(tmp_path: Path) -> Path:
    """As if FlashInfer had been installed there."""
    for name in (
        "flashinfer/prefill.py", "flashinfer/tuning.json", "flashinfer/kernel.cu", "flashinfer/data/build.py",
        "flashinfer/data/csrc/batch_prefill.cu", "flashinfer/data/csrc/config.jinja", "flashinfer/data/csrc/gemm.cu",
        "flashinfer_python-9.9.dist-info/METADATA", "pynvml.py", "other.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_the_archive_for_a_bare_machine_leaves_out_what_only_a_compiler_reads(tmp_path: Path) -> None:
    assert {name for _, name in gpu_pack.python_files(site(tmp_path))} == {
        "flashinfer/prefill.py",
        "flashinfer/tuning.json",
        "flashinfer/data/csrc/batch_prefill.cu",
        "flashinfer/data/csrc/config.jinja",
        "flashinfer_python-9.9.dist-info/METADATA",
        "pynvml.py",
    }


def test_modules_of_another_flashinfer_are_not_packed(tmp_path: Path) -> None:
    library = tmp_path / "name" / "name.so"
    library.parent.mkdir()
    library.touch()
    Built("9.9", "9.0a").write(library)
    names = [name for _, name in gpu_pack.modules(tmp_path, "9.9")]
    assert names == ["flashinfer/data/aot/name/built.json", "flashinfer/data/aot/name/name.so"]
    with pytest.raises(SystemExit, match=r"was built by flashinfer 9\.9, not 9\.8"):
        list(gpu_pack.modules(tmp_path, "9.8"))
    with pytest.raises(SystemExit, match="has no NAME/NAME"):
        list(gpu_pack.modules(tmp_path / "name", "9.9"))
