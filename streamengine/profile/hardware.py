"""What a profile says of the machine that it was taken on."""

import os
import platform
import re
from pathlib import Path

from streamengine.profile.record import Hardware


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(threads: int, device: str) -> Hardware:
    """This machine, of which ``threads`` compute on ``device``."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    return Hardware(cpu=name, cores=usable_cores(), threads=threads, device=device)
