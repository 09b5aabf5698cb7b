"""More requests than the server takes at once: they wait in the client, in order, and are no error."""

from typing import Any

import anyio
import pytest
import trio.testing

from streamengine_sdk import AsyncClient, Result, Timeouts, TokenStream, wire
from tests.sdk.scripted import Answer, Peer, ScriptedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """A clock that jumps: no test here waits."""
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer(heartbeat_s=10_000, max_streams=2)


def client_of(server: ScriptedServer, **options: Any) -> AsyncClient:
    return AsyncClient("http://scripted", transport=server, continuations=0, **options)


async def silent(peer: Peer) -> bool:
    await anyio.wait_all_tasks_blocked()
    return not len(peer.received)


async def greeted(client: AsyncClient, server: ScriptedServer) -> Peer:
    """The connection, once the client knows its limits."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ping)
        peer = await server.peer()
        ping = await peer.heard()
        assert isinstance(ping, wire.Ping)
        peer.say(wire.Pong(t=ping.t))
    return peer


async def filled(client: AsyncClient, server: ScriptedServer) -> tuple[Peer, list[Answer], list[TokenStream]]:
    """The connection with as many streams as it takes, which are to be kept: one that is dropped is cancelled."""
    peer = await greeted(client, server)
    streams = [client.stream(prompt) for prompt in "ab"]
    for stream in streams:
        await stream.__aenter__()
    return peer, [(await peer.request()).accept() for _ in streams], streams


async def ask(client: AsyncClient, prompt: str, results: list[Result], timeouts: Timeouts | None = None) -> None:
    results.append(await client.generate(prompt, timeouts=timeouts))


async def test_each_waits_for_another_to_end_and_its_clock_with_it(server: ScriptedServer) -> None:
    results: list[Result] = []
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        peer = await greeted(client, server)
        for prompt in "abcd":
            tasks.start_soon(ask, client, prompt, results, Timeouts(first_token=60, between=None, total=100))
            await anyio.wait_all_tasks_blocked()
        running = [(await peer.request()).accept() for _ in "ab"]
        for _ in "cd":
            for answer in running:
                answer.delta(".")
            await anyio.sleep(45)
            assert await silent(peer)
            running.pop(0).done()
            running.append((await peer.request()).accept())
        assert [answer.request.prompt for answer in running] == ["c", "d"]
        await anyio.sleep(50)
        for answer in running:
            answer.done()
    assert [result.finish_reason for result in results] == ["stop"] * 4


async def test_a_refusal_makes_room_as_an_end_does(server: ScriptedServer) -> None:
    results: list[Result] = []
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        peer, (refused, other), _streams = await filled(client, server)
        tasks.start_soon(ask, client, "c", results)
        assert await silent(peer)
        refused.error("invalid_request", 400)
        (await peer.request()).accept().done()
        other.done()
    assert len(results) == 1


async def test_of_one_that_is_dropped_before_its_turn_the_server_never_hears(server: ScriptedServer) -> None:
    results: list[Result] = []
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        peer, answers, _streams = await filled(client, server)
        dropped = client.stream("dropped")
        await dropped.__aenter__()
        del dropped
        tasks.start_soon(ask, client, "last", results)
        assert await silent(peer)
        answers[0].done()
        answer = (await peer.request()).accept()
        assert answer.request.prompt == "last"
        answer.done()
        answers[1].done()
    assert len(results) == 1


async def test_one_that_is_cancelled_before_its_turn_ends_cancelled(server: ScriptedServer) -> None:
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        peer, answers, _streams = await filled(client, server)
        stream = client.stream("c")
        tasks.start_soon(stream.cancel)
        assert await silent(peer)
        answers[0].done()
        answer = (await peer.request()).accept()
        assert isinstance(await peer.heard(), wire.Cancel)
        answer.done("cancelled")
        assert (await stream.result()).finish_reason == "cancelled"
        answers[1].done()


async def test_one_that_was_too_slow_keeps_its_place(server: ScriptedServer) -> None:
    results: list[Result] = []
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        peer, (slow, other), (stream, _other) = await filled(client, server)
        tasks.start_soon(ask, client, "c", results)
        slow.error("slow_consumer", 429, retryable=True)
        assert await silent(peer)
        tasks.start_soon(stream.result)
        assert isinstance(await peer.heard(), wire.Attach)
        slow.accept()
        slow.done()
        (await peer.request()).accept().done()
        other.done()
    assert len(results) == 1


async def test_a_server_that_goes_away_gets_no_more_and_the_next_gets_those_that_wait(server: ScriptedServer) -> None:
    results: list[Result] = []
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        peer = await greeted(client, server)
        for prompt in "abc":
            tasks.start_soon(ask, client, prompt, results)
            await anyio.wait_all_tasks_blocked()
        running = [(await peer.request()).accept() for _ in "ab"]
        peer.say(wire.GoAway(reason="max_session", deadline_ms=1000, reconnect=True))
        for answer in running:
            answer.done()
        assert await silent(peer)
        peer.drop(1001)
        answer = await (await server.peer()).request()
        assert answer.request.prompt == "c"
        answer.accept().done()
    assert len(results) == 3


async def test_before_the_server_said_how_many_it_takes_a_few_go_out(server: ScriptedServer) -> None:
    hello, server.hello = server.hello, None
    results: list[Result] = []
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(ask, client, str(number), results)
        peer = await server.peer()
        blind = [await peer.request() for _ in range(8)]
        assert await silent(peer)
        assert hello is not None
        peer.say(hello)
        for answer in blind:
            answer.accept().done()
        for _ in range(12):
            (await peer.request()).accept().done()
    assert len(results) == 20
