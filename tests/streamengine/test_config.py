"""What a person may set: exact values within limits, or an error by the name of the field."""

from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from streamengine import compose
from streamengine.config import EngineConfig, ServerConfig
from streamengine.errors import StartupError

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (EngineConfig, "model", ""),
        (EngineConfig, "model", 5),
        (EngineConfig, "model", "\ud800"),
        (EngineConfig, "model", "x" * 5000),
        (EngineConfig, "dtype", "float16"),
        (EngineConfig, "dtype", []),
        (EngineConfig, "eager", 1),
        (EngineConfig, "threads", 0),
        (EngineConfig, "threads", True),
        (EngineConfig, "page_size", 16.0),
        (EngineConfig, "page_size", 2**20),
        (EngineConfig, "kv_pages", 2**70),
        (EngineConfig, "max_model_len", "512"),
        (EngineConfig, "max_num_seqs", None),
        (EngineConfig, "max_num_batched_tokens", 2**31),
        (EngineConfig, "prefix_quota", NAN),
        (EngineConfig, "target_itl_ms", INFINITY),
        (EngineConfig, "priority_ageing_s", 10**400),
        (EngineConfig, "speculate_tokens", -1),
        (EngineConfig, "trace", ""),
        (ServerConfig, "host", None),
        (ServerConfig, "port", 70000),
        (ServerConfig, "allow_origins", "https://a.example"),
        (ServerConfig, "allow_hosts", (5,)),
        (ServerConfig, "max_message_bytes", 0),
        (ServerConfig, "heartbeat_s", 0),
        (ServerConfig, "heartbeat_s", NAN),
        (ServerConfig, "heartbeat_s", 1e10),
        (ServerConfig, "drain_s", INFINITY),
        (ServerConfig, "drain_s", -1),
    ],
)
def test_what_cannot_be_set_is_refused_by_the_name_of_the_field(config: Any, field: str, value: Any) -> None:
    with pytest.raises(StartupError, match=field) as caught:
        config(**{field: value})
    assert caught.value.param == field
    assert len(caught.value.message) <= 300


def test_numbers_of_other_libraries_and_paths_become_what_can_travel() -> None:
    given: dict[str, Any] = {
        "model": Path("/models/a"),
        "page_size": numpy.int64(8),
        "prefix_quota": numpy.float32(0.5),
    }
    config = EngineConfig(**given, target_itl_ms=5)
    assert (config.model, config.page_size, config.prefix_quota) == ("/models/a", 8, 0.5)
    assert type(config.target_itl_ms) is float
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2), (64, 63)])
def test_of_many_cores_one_is_left_to_the_event_loop(cores, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(compose, "usable_cores", lambda: cores)
    assert compose.default_threads() == threads


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("5,2", 5), ("0", 2), ("many", 2), ("", 2)])
def test_the_variable_of_openmp_says_how_many_threads(variable, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(compose, "usable_cores", lambda: 2)
    assert compose.default_threads() == threads
