"""Replicas on Ray: whatever happens to one of them, the answers of its sockets are whole."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from streamengine.errors import StartupError, UnsupportedFeature
from streamengine_sdk import AsyncClient, Backoff, InvalidRequest, Result
from streamengine_sdk.events import Delta
from tests.fakes import oracle
from tests.fleet.conftest import DRAIN_S, Fleet

SOCKETS = 32
PATIENCE_S = 90.0
SOON = Backoff(first=0.1, longest=1.0, give_up=PATIENCE_S)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def expected(prompt: str, tokens: int) -> str:
    return bytes(oracle(prompt.encode(), tokens)).decode()


async def answers(url: str, lengths: list[int], strike: Callable[[], None], *, after: int = 20) -> list[Result]:
    """One socket for each answer; ``strike`` is called when all have got ``after`` tokens."""
    results: dict[int, Result] = {}
    begun, ready = set[int](), anyio.Event()

    async def ask(number: int, tokens: int) -> None:
        client = AsyncClient(url, reconnect=SOON)
        async with client, client.stream(f"prompt {number}", temperature=0, max_tokens=tokens) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.seq >= after:
                    begun.add(number)
                    if len(begun) == len(lengths):
                        ready.set()
            results[number] = await stream.result()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            for number, tokens in enumerate(lengths):
                tasks.start_soon(ask, number, tokens)
            await ready.wait()
            await anyio.to_thread.run_sync(strike)
    return [results[number] for number in range(len(lengths))]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def epoch(url: str) -> Any:
    """Of the replica that the proxy leads to."""
    with connect(f"ws{url.removeprefix('http')}/v1/stream") as socket:
        return json.loads(socket.recv(timeout=20))["epoch"]


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.1)


def test_a_replica_is_a_whole_server(fleet: Fleet) -> None:
    fleet.deploy(2)
    assert get(f"{fleet.url}/ready") == {"status": "ready"}
    assert get(f"{fleet.url}/v1/models")["data"][0]["id"] == "fake"
    body = json.dumps({"model": "fake", "prompt": "abc", "max_tokens": 9, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{fleet.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        assert json.loads(answer.read())["choices"][0]["text"] == expected("abc", 9)


@pytest.mark.anyio
async def test_answers_of_a_replica_that_is_killed_are_continued_by_another(fleet: Fleet) -> None:
    fleet.deploy(2)
    eventually(lambda: len(fleet.replicas()) == 2)
    eventually(lambda: len({epoch(fleet.url) for _ in range(8)}) == 2)
    victim = fleet.replicas()[0]
    results = await answers(fleet.url, [150] * SOCKETS, lambda: fleet.kill(victim))
    for number, result in enumerate(results):
        assert result.text == expected(f"prompt {number}", 150)
        assert (result.finish_reason, result.seq) == ("length", 150)
    assert 0 < sum(bool(result.continued) for result in results) < SOCKETS
    eventually(lambda: len(fleet.replicas()) == 2 and victim not in fleet.replicas())


@pytest.mark.anyio
async def test_a_fleet_that_shrinks_under_load_completes_or_hands_on_what_runs(fleet: Fleet) -> None:
    fleet.deploy(2)
    eventually(lambda: len(fleet.replicas()) == 2)
    long, short = 500, 120
    lengths = [short, long] * 8
    begun = time.monotonic()
    results = await answers(fleet.url, lengths, lambda: fleet.deploy(1))
    assert time.monotonic() - begun > DRAIN_S
    for number, (tokens, result) in enumerate(zip(lengths, results, strict=True)):
        assert result.text == expected(f"prompt {number}", tokens)
    assert sum(bool(result.continued) for result in results[1::2]) > 0, "nothing was cut"
    assert not any(result.continued for result in results[::2]), "what had time to finish was cut"
    eventually(lambda: len(fleet.replicas()) == 1)


@pytest.mark.anyio
async def test_prompts_are_computed_by_replicas_for_that_and_without_them_too(fleet: Fleet) -> None:
    fleet.deploy(1, prefill=1, prefill_threshold=64)

    def landed() -> float:
        return float(get(f"{fleet.url}/v1/stats")["remote_landed"])

    async def ask(number: int) -> None:
        prompt = f"{number} " * 100
        async with AsyncClient(fleet.url, reconnect=SOON) as client:
            result = await client.generate(prompt, temperature=0, max_tokens=20)
        assert result.text == expected(prompt, 20)

    await anyio.to_thread.run_sync(eventually, lambda: get(f"{fleet.url}/v1/stats")["remote_peers"] == 1)
    for number in range(4):
        await ask(number)
    assert landed() == 4
    fleet.kill(next(process for process in fleet.replicas() if "prefill" in fleet.name(process)))
    for number in range(4, 8):
        await ask(number)
    await anyio.to_thread.run_sync(eventually, lambda: get(f"{fleet.url}/v1/stats")["remote_peers"] == 1)
    before = landed()
    for number in range(8, 12):
        await ask(number)
    assert landed() == before + 4


def test_a_fleet_grows_by_what_waits_and_counts_replicas_that_have_said_nothing_as_they_are() -> None:
    from streamengine.serve_ray import by_load

    load = {"running": 8.0, "waiting": 9.0, "seats": 8.0, "kv_used": 0.5}
    context = SimpleNamespace(
        running_replicas=["a", "b"],
        target_num_replicas=2,
        aggregated_metrics={name: {"a": value, "b": value} for name, value in load.items()},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
    )
    assert by_load(context) == (5, {})
    context.running_replicas.append("c")
    assert by_load(context) == (2, {})


@pytest.mark.parametrize(("version", "good"), [("2.60.0", True), ("2.69.1", True), ("2.70.0", False), ("2.9.3", False)])
def test_another_version_of_ray_is_refused(version: str, good: bool) -> None:
    from streamengine.serve_ray import check_version

    with nullcontext() if good else pytest.raises(StartupError, match="was written for"):
        check_version(version)


@pytest.mark.parametrize(
    ("given", "what"), [({"replicaz": 2}, "replicaz"), ({"port": -1}, "port"), ({"replicas": 0}, "replicas")]
)
def test_what_cannot_be_deployed_is_refused_by_name(given: Any, what: str) -> None:
    from streamengine.serve_ray import app

    with pytest.raises(StartupError, match=what):
        app(given)


@pytest.mark.parametrize("given", [{"tls_cert": "a", "tls_key": "b"}, {"log_format": "json"}])
def test_what_ray_does_itself_is_refused_by_name(given: Any) -> None:
    from streamengine.serve_ray import app

    with pytest.raises(UnsupportedFeature, match=f"{min(given)} is for a server by itself"):
        app(given)


@pytest.mark.anyio
async def test_too_large_a_message_ends_the_connection(fleet: Fleet) -> None:
    fleet.deploy(1, max_message_bytes=5000)
    async with AsyncClient(fleet.url, reconnect=None) as client:
        assert (await client.generate("x", temperature=0, max_tokens=3)).text == expected("x", 3)
        with pytest.raises(InvalidRequest, match="at most 5000"):  # by the client, which was told the limit
            await client.generate("x" * 6000)
    with connect(f"ws{fleet.url.removeprefix('http')}/v1/stream") as socket:
        socket.send(json.dumps({"type": "ping", "x_": "y" * 6000}))
        with pytest.raises(ConnectionClosedError, match="1009"):
            while True:
                socket.recv(20)


def test_a_fleet_behind_rays_own_proxy_serves_and_ends_on_a_signal() -> None:
    apart = ["unshare", "-n", "sh", "-c", f"ip link set lo up && exec {sys.executable} -m tests.fleet.alone"]
    ended = subprocess.run(apart, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2])
    text = expected("hello", 12)
    assert (ended.stdout.splitlines()[0], ended.returncode) == (f"{text} {text}", 0), ended.stderr[-3000:]


def test_answers_of_a_node_that_is_killed_are_continued_on_another_machine() -> None:
    command = ["unshare", "-n", sys.executable, "-m", "tests.fleet.two_nodes"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=Path(__file__).parents[2])
    assert "done" in ended.stdout.splitlines(), ended.stderr[-3000:]
