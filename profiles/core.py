"""The core of the soak, in a process of its own: a runner that reads every token back through its page table."""

import time
from pathlib import Path

from compiled.step import Step
from streamengine import child
from tests.fakes import FakeHandle, FakeRunner, fake_kv

STEP_S = 0.003
PAGES = 1024


class Paced(FakeRunner):
    """Takes as long as a small model does, and keeps no steps."""

    def submit(self, step: Step) -> FakeHandle:
        time.sleep(STEP_S)
        self.steps.clear()
        return super().submit(step)

    def statistics(self) -> dict[str, float]:
        return {"resident_bytes": resident()}


def resident() -> int:
    """Bytes of this process that are in memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


if __name__ == "__main__":
    child.main(lambda config, report: Paced(fake_kv(pages=1 + PAGES, page_size=16)))
