"""What is installed, what this machine has, and what a default start would do with it. Changes nothing."""

import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from streamengine import compose

CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")
"""Those that decide which kernels and which dtype are fast, as the kernel names them."""


def examine() -> dict[str, dict[str, Any]]:
    """Facts by section, fit for JSON; sizes are in bytes and their names end in ``_bytes``."""
    return {
        "versions": {"python": platform.python_version(), **_packages()},
        "cpu": _cpu(),
        "compiler": _compiler(),
        "gpu": compose.describe_gpu(),
        "default start": compose.describe_machine(),
    }


def _packages() -> dict[str, str]:
    """The installed version of streamengine and of everything that it asks for."""
    wishes = [wish for wish in metadata.requires("streamengine") or () if "extra ==" not in wish]
    names = [re.split(r"[^A-Za-z0-9._-]", wish)[0] for wish in wishes]
    return {name: _version(name) for name in ["streamengine", *sorted(names)]}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing"


def _cpu() -> dict[str, str]:
    found: dict[str, str] = {"machine": platform.machine()}
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    for key, name in (("model name", "name"), ("flags", "flags"), ("Features", "flags")):
        match = re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE)
        if match:
            found[name] = match[1]
    there = found.get("flags", "").split()
    found["flags"] = " ".join(flag for flag in CPU_FLAGS if flag in there) or "none of those that matter"
    return found


def _compiler() -> dict[str, str]:
    path = shutil.which("g++")
    if path is None:
        return {"g++": "missing: nothing can be compiled, only --eager with --attention reference runs"}
    version = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=False)
    return {"g++": path, "version": version.stdout.strip()}


def lines(report: dict[str, dict[str, Any]]) -> list[str]:
    """The report for a person: a heading per section, a line per fact that there is something to say about."""
    shown: list[str] = []
    for section, facts in report.items():
        told = {name: _text(name, fact) for name, fact in facts.items()}
        width = max(len(name) for name in told)
        shown += [section, *(f"  {name:<{width}}  {text}" for name, text in told.items() if text)]
    return shown


def _text(name: str, fact: Any) -> str:
    return f"{fact / 2**20:,.0f} MiB" if name.endswith("_bytes") else str(fact)
