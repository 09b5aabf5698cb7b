"""`profiles/gpu_check.py` on the GPU of this machine: a test for each of its sections."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.gpu_check import SECTIONS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; tests/gpu/README.md says what is missed"),
]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """The check's last line."""
    command = [sys.executable, str(ROOT / "profiles" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    sys.stdout.write(done.stdout)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("section", SECTIONS)
def test_the_section_passes(told: dict[str, Any], section: str) -> None:
    assert told["failed"].get(section) is None


def test_every_goal_is_met(told: dict[str, Any]) -> None:
    assert [name for name, goal in told["goals"].items() if not goal["met"]] == []
