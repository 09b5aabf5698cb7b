"""The script for a GPU, run on the CPU: minutes on a device must never be lost to a typo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from profiles import gpu_check

ROOT = Path(__file__).resolve().parents[1]
MISSING = ("anyio", "gguf", "llguidance", "msgspec", "starlette", "websockets")
"""Libraries of the server, which a machine for GPU checks need not have."""


def run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({name!r})")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "profiles" / "gpu_check.py"), "--dry-run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env, check=False)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if told["ok"] else 1)
    return told, done.stdout


def test_every_section_runs_through_on_the_recording_device(tmp_path: Path) -> None:
    told, output = run(tmp_path)
    assert told["failed"] == {}, output
    assert set(told["facts"]) == set(gpu_check.SECTIONS)
    assert told["device"] == "recording" and "goals" not in told
    assert told["facts"]["float32"]["greedy_tokens_equal"] > 0
    assert told["facts"]["graphs"]["difference_when_repeated"] == 0
