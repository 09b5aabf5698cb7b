"""What a GPU has to show, in one run of minutes: correctness first, then speed against the device's own ceilings.

    python profiles/gpu_check.py             on a machine with one GPU, less than six minutes
    python profiles/gpu_check.py --dry-run   the same on the CPU, through the recording device, with tiny sizes

Needs torch, transformers, safetensors and, on a GPU, FlashInfer with its modules built; what a bare machine lacks
`profiles/gpu_pack.py` lays out. Of the server's libraries it needs only those that the scheduler imports.

Sections run one after the other in a process of their own, each with a time budget. One that fails, hangs or kills its
process is told, and the rest goes on in a new process: an illegal access takes a CUDA context with it. The last line is
one JSON object. Exit status 0 if nothing failed.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "machine": 40,
    "conformance": 60,
    "bfloat16": 150,
    "graphs": 60,
    "overlap": 40,
    "decode": 70,
    "prefill": 40,
    "profile": 30,
    "engine": 40,
    "float8": 40,
    "float32": 90,
}
"""In this order; the seconds that each may take, at most."""

START_S = 60
"""What a new process may take until its first section begins."""


@dataclass
class Report:
    """What is known so far. ``facts`` by section; ``failed`` says why, for those that did not pass."""

    facts: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Child:
    """The process that runs sections, and its lines: JSON for us, and whatever else, which is shown."""

    def __init__(self, sections: list[str], arguments: argparse.Namespace, work: str) -> None:
        command = [sys.executable, "-m", "profiles.gpu.child", "--work", work, *sections]
        command += ["--dry-run"] if arguments.dry_run else []
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *arguments.path]), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def message(self, seconds: float) -> dict[str, Any] | None:
        """The next one; None at its end. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            if line.startswith('{"section":'):
                return json.loads(line)
            self._last = line or self._last
            print(line, flush=True)

    def end(self) -> str:
        """Its exit status and last line; it is killed if it still runs, with all that it started."""
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        status = self._process.returncode
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"{how}, {self._last[:300]}"


def check(arguments: argparse.Namespace) -> Report:
    """Run all sections, in as few processes as their failures allow."""
    report = Report()
    deadline = time.monotonic() + arguments.seconds
    todo = list(arguments.sections)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=arguments.work) as work:
        while todo:
            child = Child(todo, arguments, work)
            try:
                todo = list(_sections(child, todo, report, deadline))
            finally:
                child.end()
            if todo and time.monotonic() > deadline - 5:
                report.failed |= dict.fromkeys(todo, f"not run: the {arguments.seconds} s were over")
                break
    return report


def _sections(child: Child, todo: list[str], report: Report, deadline: float) -> Iterator[str]:
    """Take what ``child`` says of its sections; those left, once it is of no more use."""
    current, limit = todo[0], float(START_S)
    while True:
        try:
            told = child.message(min(limit, deadline - time.monotonic()))
        except TimeoutError:
            _fail(report, current, f"took more than {limit:.0f} s, or the time of all was over")
            break
        if told is None:
            _fail(report, current, f"its process ended: {child.end()}")
            break
        if told["state"] == "unusable":
            break  # its device is; no section of it was running
        current = told["section"]
        if told["state"] == "begins":
            limit = SECTIONS[current]
            print(f"== {current}", flush=True)
            continue
        todo = [name for name in todo if name != current]
        report.seconds[current] = told["seconds"]
        report.facts[current] = told["facts"]
        if told["state"] == "failed":
            _fail(report, current, told["why"])
        if not todo:
            break
        current, limit = todo[0], float(START_S)
    yield from (name for name in todo if name not in report.failed)


def _fail(report: Report, section: str, why: str) -> None:
    report.failed[section] = why
    print(f"!! {section} failed: {why}", flush=True)


GOALS = {
    "decode at batch 1, percent of the memory ceiling": (("decode", "1", "percent"), 75.0, True),
    "prefill of 8192, percent of the matrix ceiling": (("prefill", "8192", "percent"), 60.0, True),
    "steps that the device waited for, scheduler included, percent": (("engine", "late_percent"), 3.0, False),
    "seconds to capture all graphs": (("graphs", "capture_seconds"), 5.0, False),
}
"""Where each is found, the goal, and whether more is better."""


def goals(report: Report) -> dict[str, Any]:
    """Each goal with what was measured: null where nothing was."""
    found = {}
    for name, (path, goal, more) in GOALS.items():
        value: Any = report.facts
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        met = None if value is None else value >= goal if more else value <= goal
        found[name] = {"goal": goal, "measured": value, "met": met}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU's recording device")
    parser.add_argument("--seconds", type=float, default=345, help="for everything")
    parser.add_argument("--path", action="append", default=[], help="a folder with packages, such as FlashInfer's")
    parser.add_argument("--work", help="folder for the random checkpoint, some gigabytes; by default that of tempfile")
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; all by default")
    arguments = parser.parse_args()
    arguments.sections = arguments.sections or list(SECTIONS)
    if unknown := set(arguments.sections) - SECTIONS.keys():
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    arguments.path = [str(Path(path).resolve()) for path in arguments.path]
    arguments.path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    started = time.monotonic()
    report = check(arguments)
    told = {
        "ok": not report.failed,
        "device": "recording" if arguments.dry_run else "cuda",
        "seconds": round(time.monotonic() - started, 1),
        "failed": report.failed,
        "section_seconds": report.seconds,
        **({} if arguments.dry_run else {"goals": goals(report)}),  # a figure from here would say nothing of a GPU
        "facts": report.facts,
    }
    print(json.dumps(told))
    return 0 if not report.failed else 1


if __name__ == "__main__":
    sys.exit(main())
