"""Pages between two hosts, over TCP and nothing else: each is a network namespace of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transfer_hosts import no_namespaces
from tests.transfers import NIXL, no_nixl

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["whole", "cut"])
def test_pages_of_another_host_land_over_tcp_and_a_cut_cable_hurts_nobody(case: str) -> None:
    if reason := no_nixl() or no_namespaces():
        pytest.skip(reason)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}:{NIXL}"}
    command = ["unshare", "-n", "-m", sys.executable, "-m", "tests.transfer_hosts", case]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, cwd=ROOT)
    assert ran.returncode == 0 and ran.stdout.endswith("ok\n"), ran.stderr
