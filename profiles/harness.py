"""Runs a scenario and knows where its profile is kept: what the scenarios and the comparison share.

Each run is a process of its own, as a user would start it. Of several runs the quietest counts, by its median step:
what a neighbour on a shared machine does to a run makes it slower, never faster.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from streamengine.profile.record import Profile, encode, read

HERE = Path(__file__).resolve().parent
BASELINES = HERE / "baselines"
OUT = HERE.parent / "build" / "profile"
MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Scenario:
    """``name`` is its file's and its baseline's, ``kind`` what `streamengine profile --scenario` calls it;
    ``options`` are more of that command's."""

    name: str
    kind: str
    steps: int
    options: tuple[str, ...] = field(default=())


def run(scenario: Scenario, model: str = MODEL, runs: int = 1) -> Path:
    """The folder with profile.json and report.html of the quietest of ``runs``."""
    folders = [OUT / model.replace("/", "-") / scenario.name / str(number) for number in range(runs)]
    for folder in folders:
        command = [sys.executable, "-m", "streamengine", "profile", "--model", model, "--scenario", scenario.kind]
        command += ["--steps", str(scenario.steps), "--out", str(folder), *scenario.options]
        if (status := subprocess.run(command, stdout=sys.stderr).returncode) != 0:
            raise SystemExit(status)
    return min(folders, key=lambda folder: read(folder / "profile.json").step_s.p50)


def baseline(scenario: Scenario, profile: Profile) -> Path:
    """Where the baseline for what ``profile`` was taken on is, or would be."""
    there = profile.hardware
    machine = there.cpu if there.device == "cpu" else there.device
    parts = (scenario.name, profile.model, profile.dtype, machine, f"{there.cores} cores", f"{there.threads} threads")
    return BASELINES / ("--".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".json")


def keep(profile: Profile, path: Path) -> None:
    """As a baseline: without sources, which every version of torch writes anew."""
    bare = tuple(msgspec.structs.replace(piece, kernels=(), graph=None, code=None) for piece in profile.pieces)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode(msgspec.structs.replace(profile, pieces=bare, trace=None)) + b"\n")


def main(scenario: Scenario) -> None:
    """What a scenario's file does when it is run: the last line is the path of its report."""
    parser = argparse.ArgumentParser(description=f"Profile the scenario {scenario.name}.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--runs", type=int, default=1, help="take the quietest of so many")
    asked = parser.parse_args()
    print(run(scenario, asked.model, asked.runs) / "report.html")
