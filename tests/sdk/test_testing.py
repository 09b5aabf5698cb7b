"""The aids for users' tests do what they say."""

from collections.abc import Iterator

import anyio
import pytest

from streamengine_sdk import (
    AsyncClient,
    Backoff,
    ConnectionLost,
    EngineError,
    Overloaded,
    StreamLost,
    TransportClosed,
    events,
    wire,
)
from streamengine_sdk.testing import FakeServer, FaultyTransport, MemoryPeer, MemoryTransport

pytestmark = pytest.mark.anyio
AT_ONCE = Backoff(first=1e-6)


def endless() -> Iterator[str]:
    while True:
        yield "x"


async def test_an_endless_answer_is_drawn_as_far_as_the_window() -> None:
    drawn = 0

    def counted(_: wire.Generate) -> Iterator[str]:
        nonlocal drawn
        while True:
            drawn += 1
            yield "x"

    server = FakeServer(counted)
    async with AsyncClient("http://fake", transport=server, window=8) as client, client.stream("hi") as stream:
        await anyio.wait_all_tasks_blocked()
        assert drawn == 8 + 1  # one more tells whether the answer has ended
        for _ in range(4):
            await anext(stream)
        await anyio.wait_all_tasks_blocked()
        assert drawn == 12 + 1


async def test_what_was_cancelled_and_what_was_asked_can_be_looked_up() -> None:
    server = FakeServer(lambda _: endless())
    async with AsyncClient("http://fake", transport=server) as client:
        async for _ in client.stream("forever"):
            break
        assert (await client.generate("short", max_tokens=3)).finish_reason == "length"
    assert [request.prompt for request in server.requests] == ["forever", "short"]
    assert [request.prompt for request in server.cancelled] == ["forever"]


async def test_one_key_is_one_stream() -> None:
    server = FakeServer()
    async with AsyncClient("http://fake", transport=server) as client:
        one, two = [await client.generate("hi", key="12345678") for _ in range(2)]
    assert one.stream_id == two.stream_id
    assert len(server.requests) == 1


async def test_closed_connections_come_back_and_a_restart_loses_streams() -> None:
    server = FakeServer(lambda _: endless())
    async with AsyncClient("http://fake", transport=server, reconnect=AT_ONCE, window=4) as client:
        async with client.stream("hi") as stream:
            for code in (1006, 1012):
                await anext(stream)
                server.close(code)
            seen = [(await anext(stream)).seq for _ in range(20)]  # type: ignore[union-attr]
            assert seen == list(range(3, 23))
            server.restart()
            with pytest.raises(StreamLost):
                await stream.result()
        async with client.stream("hi") as stream:
            await anext(stream)
            server.close(1000)
            with pytest.raises(ConnectionLost):
                await stream.result()


async def test_a_server_that_says_goodbye_gets_no_new_requests() -> None:
    server = FakeServer()
    async with AsyncClient("http://fake", transport=server) as client:
        await client.generate("hi")
        server.say(wire.GoAway(reason="shutdown", deadline_ms=1000, reconnect=False))
        await client.ping()
        with pytest.raises(Overloaded, match="goes away"):
            await client.generate("hi")


async def test_a_refusal_of_the_answer_is_a_refusal_of_the_request() -> None:
    def answer(request: wire.Generate) -> list[str]:
        if request.prompt == "no":
            raise EngineError("too many", code="rate_limited", status=429)
        return ["yes"]

    async with AsyncClient("http://fake", transport=FakeServer(answer)) as client:
        with pytest.raises(EngineError, match="too many") as caught:
            await client.generate("no")
        assert caught.value.code == "rate_limited"
        assert (await client.generate("hi")).text == "yes"


async def test_coalescing_and_token_ids_are_as_asked() -> None:
    server = FakeServer(["a", "b", "c"])
    async with AsyncClient("http://fake", transport=server) as client:
        result = await client.generate("hi", return_token_ids=True)
        assert (result.text, len(result.token_ids or ())) == ("abc", 3)


async def test_a_faulty_transport_breaks_splits_and_counts() -> None:
    transport = FaultyTransport(drop_every=[1200, 1500], split=1, dial=FakeServer(["word "] * 200).dial)
    async with AsyncClient("http://fake", transport=transport, reconnect=AT_ONCE) as client:
        stream = client.stream("hi")
        ends = [event async for event in stream if isinstance(event, events.Done)]
        assert (len(ends), (await stream.result()).text) == (1, "word " * 200)
    assert transport.connections == 3


async def test_a_session_and_a_client_talk_in_memory() -> None:
    ended: list[int] = []

    class Gone(Exception):
        pass

    async def session(peer: MemoryPeer) -> None:
        limits = wire.Limits(max_message_bytes=1000, max_streams=1, heartbeat_s=15)
        await peer.send_text(wire.encode(wire.Hello(protocol=wire.PROTOCOL, epoch="e", auth="none", limits=limits)))
        with pytest.raises(Gone) as caught:
            while True:
                message = wire.decode_client(await peer.receive())
                if isinstance(message, wire.Generate):
                    for seq in range(1, 101):
                        await peer.writable()
                        await peer.send_text(wire.encode(wire.Delta(id=message.id, seq=seq, text="x")))
                    await peer.close(1013, "full")
        ended.append(int(str(caught.value)))

    async with anyio.create_task_group() as tasks:
        transport = MemoryTransport(lambda peer: tasks.start_soon(session, peer), closed=Gone)
        async with AsyncClient("http://memory", transport=lambda _: transport, reconnect=None) as client:
            with pytest.raises(ConnectionLost) as caught:
                await client.generate("hi")
            assert caught.value.close_code == 1013
            assert caught.value.partial is not None
            assert caught.value.partial.text == "x" * 100
    assert ended == [1013]
    with pytest.raises(TransportClosed):
        await transport.send("too late")
