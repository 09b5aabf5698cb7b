"""What the replicas of a test fleet run: a fake model in a thread of the replica, which needs no torch."""

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import msgspec

from compiled.step import Step
from streamengine.config import EngineConfig
from streamengine.engine import Engine
from tests.fakes import FakeHandle, FakeRunner, fake_kv, fake_model
from tests.serving import engine_over

STEP_S = 0.02
MOST = 4096


@dataclass(eq=False)
class Paced(FakeRunner):
    """Takes its time for a step, so that answers are under way when something happens to their replica."""

    def submit(self, step: Step) -> FakeHandle:
        time.sleep(STEP_S)
        return super().submit(step)


def open_engine(config: EngineConfig) -> AbstractAsyncContextManager[Engine]:
    def build(report: object) -> Paced:
        return Paced(kv=fake_kv(pages=4097, page_size=16), model=fake_model(MOST), shared=config.transfer is not None)

    given = {name: getattr(config, name) for name in msgspec.structs.asdict(config)}
    return engine_over(build, **given)(lambda progress: None)
