"""The process in which `profiles/gpu_check.py` runs sections: a line of JSON where one begins and where one ends."""

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from profiles.gpu.bench import Bench
from profiles.gpu.sizes import DRY, H200

SECTIONS = {
    "machine": "machine.measure",
    "conformance": "attention.check",
    "bfloat16": "model.bfloat16",
    "graphs": "model.graphs",
    "overlap": "speed.overlap",
    "decode": "speed.decode",
    "prefill": "speed.prefill",
    "profile": "speed.profile",
    "engine": "engine.engine",
    "float8": "model.float8",
    "float32": "model.float32",
}
"""Where each is, to be imported when it begins: what one of them cannot import is its failure alone."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("sections", nargs="+")
    arguments = parser.parse_args()
    bench = Bench(DRY if arguments.dry_run else H200, arguments.work)
    for name in arguments.sections:
        _tell(name, "begins")
        started = time.monotonic()
        bench.facts = {}  # a section writes what it knows as it goes, so that its failure does not lose it
        try:
            module, _, function = SECTIONS[name].partition(".")
            getattr(importlib.import_module(f"profiles.gpu.{module}"), function)(bench)
        except Exception as error:
            traceback.print_exc(limit=-6)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            _tell(name, "failed", seconds=_since(started), why=why, facts=bench.facts)
            if not _usable(bench):
                _tell(name, "unusable")
                sys.exit()
        else:
            _tell(name, "passed", seconds=_since(started), facts=bench.facts)


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def _tell(section: str, state: str, **more: Any) -> None:
    print(json.dumps({"section": section, "state": state, **more}), flush=True)


def _usable(bench: Bench) -> bool:
    """Whether the device still answers: after an illegal access nothing works in its process."""
    bench.close()
    if bench.sizes.device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
