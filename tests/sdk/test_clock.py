"""What depends on time, on a clock that jumps: no test here waits."""

from typing import Any

import anyio
import pytest
import trio.testing

from streamengine_sdk import AsyncClient, Backoff, ConnectError, ConnectionLost, EngineError, Timeout, Timeouts, wire
from streamengine_sdk.testing import FakeServer, FaultyTransport
from tests.sdk.scripted import ScriptedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.mark.parametrize(
    ("kind", "tokens", "at"), [("first_token", 0, 60), ("between", 2, 32), ("total", 2, 20), ("connect", 0, 5)]
)
async def test_each_deadline_passes_when_it_says_and_names_itself(kind: str, tokens: int, at: float) -> None:
    server = ScriptedServer(heartbeat_s=1000)
    timeouts = Timeouts(total=20 if kind == "total" else None)
    begin = anyio.current_time()
    if kind == "connect":
        server.connectable = anyio.Event()

    async def serve() -> None:
        if kind != "connect":
            answer = (await (await server.peers.get()).request()).accept()
            for _ in range(tokens):
                await anyio.sleep(1)
                answer.delta("x")

    async with (
        AsyncClient("http://scripted", transport=server, timeouts=timeouts) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(serve)
        with pytest.raises(Timeout) as caught:
            await client.generate("hi")
    assert caught.value.kind == kind
    assert anyio.current_time() - begin == at


async def test_heartbeats_keep_a_connection_and_two_and_a_half_without_end_it() -> None:
    server = ScriptedServer(heartbeat_s=15)
    timeouts = Timeouts(first_token=None)
    async with (
        AsyncClient("http://scripted", transport=server, reconnect=None, timeouts=timeouts) as client,
        client.stream("hi") as stream,
    ):
        peer = await server.peer()
        for _ in range(4):
            await anyio.sleep(37)
            peer.say(wire.Heartbeat())
        await anyio.wait_all_tasks_blocked()
        begin = anyio.current_time()
        with pytest.raises(ConnectionLost, match=r"nothing was heard for 37\.5 s"):
            await stream.result()
        assert anyio.current_time() - begin == 37.5


async def test_a_server_that_does_not_even_greet_is_dead_too() -> None:
    server = ScriptedServer()
    server.hello = None
    async with AsyncClient("http://scripted", transport=server, reconnect=None) as client:
        with pytest.raises(ConnectionLost, match="nothing was heard"):
            await client.generate("hi")
    assert anyio.current_time() >= 37.5


async def test_a_dead_connection_is_replaced_like_a_broken_one() -> None:
    server = ScriptedServer(heartbeat_s=4)
    async with AsyncClient("http://scripted", transport=server) as client, client.stream("hi") as stream:
        answer = (await (await server.peers.get()).request()).accept()
        answer.delta("a")
        peer = await server.peers.get()
        assert (await peer.heard()).after == 1
        peer.say(wire.Accepted(id="r1", stream="st_00000000000000000000r1", after=1))
        answer.move(peer)
        answer.done()
        assert (await stream.result()).text == "a"
        assert 10 <= anyio.current_time() <= 10.25


async def test_a_server_that_is_gone_is_given_up_after_a_minute_of_ever_longer_waits() -> None:
    server = ScriptedServer()
    waits: list[float | None] = []
    async with (
        AsyncClient(
            "http://scripted",
            transport=server,
            timeouts=Timeouts(first_token=None),
            on_event=lambda trace: waits.append(trace.retry_in) if trace.kind == "lost" else None,
        ) as client,
        client.stream("hi") as stream,
    ):
        peer = await server.peer()
        server.refusal = ConnectError("no")
        begin = anyio.current_time()
        peer.drop()
        with pytest.raises(ConnectionLost, match="nothing arrived for 60 s"):
            await stream.result()
        assert 52 <= anyio.current_time() - begin <= 60
    assert waits[-1] is None
    assert all(wait is not None and 0 <= wait <= min(8, 0.25 * 2**k) for k, wait in enumerate(waits[:-1]))


async def test_a_fake_server_keeps_idle_connections_alive() -> None:
    async with AsyncClient("http://fake", transport=FakeServer(), reconnect=None) as client:
        assert (await client.generate("hi")).text == "Hello, world"
        await anyio.sleep(1000)
        assert await client.ping() == 0


async def test_a_crawling_connection_is_a_slow_stream_and_no_other_thing() -> None:
    transport = FaultyTransport(delay=2, dial=FakeServer(["a"] * 20).dial)
    async with AsyncClient("http://fake", transport=transport) as client:
        assert (await client.generate("hi")).text == "a" * 20
        with pytest.raises(Timeout) as caught:
            await client.generate("hi", timeouts=Timeouts(first_token=60, between=1))
        assert caught.value.kind == "between"
    assert anyio.current_time() > 40


async def test_waits_can_be_short_and_an_error_of_the_fake_is_the_clients() -> None:
    server = FakeServer(failing)
    async with AsyncClient("http://fake", transport=server, reconnect=Backoff(first=1)) as client:
        with pytest.raises(EngineError, match="no more memory") as caught:
            await client.generate("hi")
        assert (caught.value.code, caught.value.partial and caught.value.partial.text) == ("engine_error", "a")


def failing(_: wire.Generate) -> Any:
    yield "a"
    raise EngineError("no more memory", code="engine_error", status=500)
