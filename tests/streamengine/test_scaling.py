"""How many replicas a fleet wants, and what cannot be a fleet."""

from typing import Any

import pytest

from streamengine.errors import StreamEngineError
from streamengine.scaling import Fleet, Load, wanted_replicas


def load(running: float = 0, waiting: float = 0, kv_used: float = 0.1) -> Load:
    return Load(running=running, waiting=waiting, seats=8, kv_used=kv_used)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([load(4), load(4)], 2),
        ([load(8, waiting=1), load(8)], 3),
        ([load(8, waiting=20), load(8)], 5),
        ([load(8, waiting=1000), load(8)], 6),
        ([load(2, kv_used=0.95), load(2, kv_used=0.95)], 3),
        ([load(2, kv_used=0.95), load(2, kv_used=0.5)], 2),
        ([load(), load(), load(1)], 2),
        ([load(), load(), load(1, kv_used=0.9)], 2),
        ([load(kv_used=0.6), load(kv_used=0.6)], 2),
        ([load()], 1),
        ([], 1),
    ],
)
def test_a_fleet_grows_for_who_waits_and_for_full_caches_and_shrinks_one_by_one(loads: list[Load], wanted: int) -> None:
    assert wanted_replicas(loads, 1, 6) == wanted


def test_a_steady_load_settles() -> None:
    replicas, work = 1, 30.0
    seen = []
    for _ in range(10):
        each = work / replicas
        now = [load(min(each, 8), max(each - 8, 0), min(1.0, each / 10)) for _ in range(replicas)]
        replicas = wanted_replicas(now, 1, 16)
        seen.append(replicas)
    assert seen[-4:] == [4, 4, 4, 4]


def test_the_bounds_hold_whatever_the_load() -> None:
    assert wanted_replicas([load(waiting=99)], 1, 3) == 3
    assert wanted_replicas([load(), load()], 2, 3) == 2


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"prefill": -1}, "prefill"),
    ],
)
def test_what_is_no_fleet_is_refused_by_name(given: Any, param: str) -> None:
    with pytest.raises(StreamEngineError) as refused:
        Fleet(**given)
    assert refused.value.param == param
