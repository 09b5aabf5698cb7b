"""How much memory there is, and how much a piece of work took. Linux's own counters, in bytes."""

import os
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def available_memory() -> int:
    """What can be had without swapping, within this process's control group."""
    machine = _machine_free()
    group = _group_free()
    return machine if group is None else min(machine, group)


def peak_of(work: Callable[[], object]) -> int:
    """By how much resident memory rose above its start while ``work`` ran; 0 where the system does not tell."""
    try:
        _RESET.write_text("5")  # sets the peak back to what is resident now
    except OSError:
        work()
        return 0
    before = _field("VmHWM")
    work()
    return max(_field("VmHWM") - before, 0)


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _machine_free() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _group_free() -> int | None:
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return None
