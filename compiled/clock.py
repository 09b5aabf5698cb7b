"""Moments of the host's time, or of a GPU's stream, and the seconds between them."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes moments and tells the seconds between two, perhaps only when all that was begun has ended."""

    def now(self) -> Any: ...

    def seconds(self, first: Any, second: Any) -> float: ...


class HostClock:
    """The time of the thread that computes."""

    now = staticmethod(time.perf_counter)

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """The time of the current stream: a moment is when it has done all that it was given before."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()
