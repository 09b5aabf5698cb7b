"""Connections that end under open streams: each stream goes on after its last token, or says why it cannot."""

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine_sdk import (
    AsyncClient,
    Backoff,
    ConnectError,
    ConnectionLost,
    EngineError,
    StreamLost,
    Timeouts,
    Trace,
    Unauthorized,
    events,
    wire,
)
from tests.sdk.scripted import PATIENCE_S, Answer, Peer, ScriptedServer

pytestmark = pytest.mark.anyio
AT_ONCE = Backoff(first=1e-6, longest=1e-6, give_up=PATIENCE_S)


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def client(server: ScriptedServer) -> AsyncClient:
    return AsyncClient("http://scripted", transport=server, reconnect=AT_ONCE)


async def attached(peer: Peer, answer: Answer, after: int) -> None:
    """Expect the re-attachment of ``answer`` and move it to ``peer``."""
    message = await peer.heard()
    stream = f"st_{answer.id:0>22}"
    assert message == wire.Attach(
        id=answer.id, stream=stream, after=after, delivery=wire.Delivery(window=1024, token_ids=True)
    )
    answer.move(peer)
    peer.say(wire.Accepted(id=answer.id, stream=stream, after=after))


@pytest.mark.parametrize("code", [1001, 1005, 1006, 1011, 1012, 1013])
async def test_a_stream_goes_on_after_its_last_token(server: ScriptedServer, client: AsyncClient, code: int) -> None:
    async with client, client.stream("hi") as stream:
        first = await server.peer()
        answer = (await first.request()).accept()
        answer.delta("Hel")
        first.drop(code)
        second = await server.peer()
        await attached(second, answer, 1)
        answer.delta("lo", n=2)
        answer.done()
        assert [event.seq async for event in stream if isinstance(event, events.Delta)] == [1, 3]
        assert (await stream.result()).text == "Hello"
        assert first.closed


async def test_every_open_stream_goes_on_and_no_other(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("one") as one, client.stream("two") as two, client.stream("three") as three:
        peer = await server.peer()
        answers = [(await peer.request()).accept() for _ in range(3)]
        answers[0].done()
        await one.result()
        answers[2].delta("three")
        peer.drop()
        peer = await server.peer()
        await attached(peer, answers[1], 0)
        await attached(peer, answers[2], 1)
        for answer in answers[1:]:
            answer.delta("!")
            answer.done()
        assert [(await stream.result()).text for stream in (two, three)] == ["!", "three!"]


async def test_sent_and_lost_before_accepted_is_sent_again_with_the_same_key(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        request = (await peer.request()).request
        assert request.key
        peer.drop()
        again = await (await server.peer()).request()
        assert again.request == request
        again.accept().done()
        await stream.result()
        async with client.stream("hi"):
            assert (await again._peer.request()).request.key != request.key


async def test_nothing_is_said_for_old_streams_before_the_epoch_is_known(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        answer.delta("Hello")
        hello, server.hello = server.hello, None
        peer.drop()
        peer = await server.peer()
        await anyio.wait_all_tasks_blocked()
        assert len(peer.received) == 1  # init
        assert hello is not None
        peer.say(hello)
        await attached(peer, answer, 1)
        answer.done()
        await stream.result()


async def test_a_new_epoch_means_that_what_was_seen_is_lost_and_what_was_not_is_asked_again(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("seen") as seen, client.stream("unseen") as unseen:
        peer = await server.peer()
        (await peer.request()).accept().delta("Hello")
        request = (await peer.request()).accept().request
        await anyio.wait_all_tasks_blocked()
        server.set_epoch("e2")
        peer.drop()
        again = await (await server.peer()).request()
        assert again.request == request
        again.accept().done()
        with pytest.raises(StreamLost) as caught:
            await seen.result()
        assert caught.value.partial is not None
        assert caught.value.partial.text == "Hello"
        await unseen.result()


async def test_a_stream_that_is_cancelled_while_there_is_no_connection_is_cancelled_on_the_next(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream, anyio.create_task_group() as tasks:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        await anyio.wait_all_tasks_blocked()
        server.connectable = anyio.Event()
        peer.drop()
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(stream.cancel)
        await anyio.wait_all_tasks_blocked()
        server.connectable.set()
        peer = await server.peer()
        await attached(peer, answer, 0)
        assert await peer.heard() == wire.Cancel(id=answer.id)
        answer.done("cancelled", cause="client")
    assert (await stream.result()).finish_reason == "cancelled"


async def test_nothing_is_opened_again_where_nothing_is_open(server: ScriptedServer, client: AsyncClient) -> None:
    async with client:
        async with client.stream("hi") as stream:
            peer = await server.peer()
            (await peer.request()).done()
            await stream.result()
        peer.drop(1001)
        await anyio.wait_all_tasks_blocked()
        assert len(server.endpoints) == 1


@pytest.mark.parametrize("code", [1000, 1009, 4400, 4403, 4429])
async def test_after_other_close_codes_nobody_comes_back(
    server: ScriptedServer, client: AsyncClient, code: int
) -> None:
    async with client, client.stream("hi") as stream:
        (await server.peer()).drop(code, "go away")
        with pytest.raises(ConnectionLost, match="go away") as caught:
            await stream.result()
        assert (caught.value.close_code, caught.value.retryable) == (code, False)
        assert len(server.endpoints) == 1


@pytest.mark.parametrize(("retryable", "connections"), [(False, 1), (True, 2)])
async def test_a_fatal_error_says_itself_whether_to_come_back(
    server: ScriptedServer, client: AsyncClient, retryable: bool, connections: int
) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        await peer.request()
        peer.say(wire.Error(code="overloaded", message="full", status=503, retryable=retryable, fatal=True))
        if retryable:
            (await (await server.peer()).request()).accept().done()
            await stream.result()
        else:
            with pytest.raises(EngineError, match="full"):
                await stream.result()
    assert len(server.endpoints) == connections


async def test_a_connection_that_cannot_be_made_is_tried_again_and_a_refusal_is_final(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        server.refusals = [ConnectError("no"), ConnectError("still no")]
        peer.drop()
        peer = await server.peer()
        assert len(server.endpoints) == 4
        await attached(peer, answer, 0)
        server.refusals = [Unauthorized("who?")]
        peer.drop()
        with pytest.raises(Unauthorized, match="who"):
            await stream.result()


async def test_streams_fail_when_nothing_arrives_for_too_long(server: ScriptedServer) -> None:
    backoff = Backoff(first=0.001, longest=0.001, give_up=0.02)
    async with AsyncClient("http://scripted", transport=server, reconnect=backoff) as client:
        for _ in range(2):  # the second stream has the whole time again
            begin = anyio.current_time()
            async with client.stream("hi") as stream:
                await server.peer()
                server.refusal = ConnectError("no")
                server.drop_all()
                with pytest.raises(ConnectionLost, match=r"nothing arrived for 0\.02 s; at last, no") as caught:
                    await stream.result()
            server.refusal = None
            assert caught.value.retryable
            assert anyio.current_time() - begin >= 0.01


async def test_a_server_that_takes_connections_and_drops_them_does_not_start_the_waits_anew(
    server: ScriptedServer,
) -> None:
    traces: list[Trace] = []
    backoff = Backoff(first=1e-4, longest=1, give_up=PATIENCE_S)
    async with (
        AsyncClient("http://scripted", transport=server, reconnect=backoff, on_event=traces.append) as client,
        client.stream("hi") as stream,
    ):
        for _ in range(6):
            peer = await server.peer()
            answer = await peer.request()
            peer.drop()
        assert client._attempt in (5, 6)
        peer = await server.peer()
        answer = await peer.request()
        answer.accept().delta("at last")
        await anext(stream)
        peer.drop()
        await attached(await server.peer(), answer, 1)
        assert client._attempt == 1
        answer.done()
        await stream.result()
    waits = [it.retry_in for it in traces if it.kind == "lost" and it.retry_in is not None]
    assert len(waits) == 7
    assert all(0 <= wait <= 1e-4 * 2**k for k, wait in enumerate(waits[:6]))


@given(st.integers(0, 2000), st.floats(0, 1, exclude_max=True))
def test_a_wait_is_drawn_from_all_of_a_range_that_doubles_to_a_bound(attempt: int, draw: float) -> None:
    assert Backoff().delay(attempt, draw) == draw * min(8, 0.25 * 2.0 ** min(attempt, 10))


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "1"])
def test_a_backoff_is_of_real_seconds(wrong: Any) -> None:
    with pytest.raises(ValueError, match="backoff first must be above 0"):
        Backoff(first=wrong)


async def test_what_runs_on_a_server_that_goes_away_moves_when_it_is_cut(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("old") as old:
        leaving = await server.peer()
        answer = (await leaving.request()).accept()
        leaving.say(wire.GoAway(reason="rebalance", deadline_ms=0, reconnect=True))
        answer.delta("a")
        await anext(old)
        async with client.stream("new") as new:
            peer = await server.peer()
            (await peer.request()).accept().done()
            await new.result()
            leaving.drop(1012)
            await attached(peer, answer, 1)
            answer.done()
            await old.result()
    assert len(server.endpoints) == 2


async def test_a_slow_reader_attaches_again_when_it_reads(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        answer.delta("a")
        answer.error("slow_consumer", 429, stream=f"st_{answer.id:0>22}", seq=1)
        texts = stream.text
        assert await anext(texts) == "a"
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                await attached(peer, answer, 1)
                answer.delta("b")

            tasks.start_soon(serve)
            assert await anext(texts) == "b"


async def test_a_stream_of_another_process_is_resumed_and_cancelled_like_ones_own(
    server: ScriptedServer, client: AsyncClient
) -> None:
    stream_id = "st_0123456789abcdef"
    async with client:
        async with client.resume(stream_id, after=5) as stream:
            peer = await server.peer()
            attach = await peer.heard()
            assert attach == wire.Attach(id="r1", stream=stream_id, after=5, delivery=wire.Delivery(window=1024))
            peer.say(wire.Accepted(id="r1", stream=stream_id, after=5))
            peer.say(wire.Delta(id="r1", seq=6, text="f"))
            assert [await anext(stream.text), stream.seq, stream.stream_id] == ["f", 6, stream_id]
        assert await peer.heard() == wire.Cancel(id="r1")
        async with client.resume(stream_id) as stream:
            await peer.heard()
            peer.say(wire.Error(id="r2", code="stream_not_found", message="gone", status=404, retryable=False))
            with pytest.raises(StreamLost, match="gone"):
                await stream.result()
        for wrong, field in (("nonsense", "stream"), (5, "stream")):
            with pytest.raises(EngineError) as caught:
                client.resume(wrong)  # type: ignore[arg-type]
            assert caught.value.param == field


async def test_a_token_is_in_the_header_and_in_init_but_in_no_trace(server: ScriptedServer) -> None:
    traces: list[Trace] = []
    async with (
        AsyncClient("http://scripted", token="s3cret", transport=server, on_event=traces.append) as client,
        client.stream("hi"),
    ):
        peer = await server.peer()
        await peer.request()
        assert peer.init == wire.Init(client="streamengine-sdk", token="s3cret", batch=True)
        assert server.endpoints[0].headers == {"Authorization": "Bearer s3cret"}
    assert any(isinstance(trace.message, wire.Init) for trace in traces)
    assert "s3cret" not in repr(traces)


async def test_several_messages_in_one_frame_are_several_messages(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        answer = await peer.request()
        accepted = wire.Accepted(id=answer.id, stream="st_0123456789abcdef", after=0)
        deltas = [wire.Delta(id=answer.id, seq=seq, text="x") for seq in (1, 2)]
        peer.say(wire.Batch(events=[accepted, wire.Heartbeat(), *deltas]))
        assert [await anext(stream) for _ in deltas] == deltas
        assert stream.stream_id == "st_0123456789abcdef"


async def test_a_server_that_asks_for_a_token_gets_on_with_one_that_sent_it(server: ScriptedServer) -> None:
    server.set_epoch("e1", auth="required")
    async with (
        AsyncClient("http://scripted", token="s3cret", transport=server) as client,
        client.stream("hi") as stream,
    ):
        (await (await server.peer()).request()).accept().done()
        await stream.result()


async def test_every_message_and_every_connection_is_traced(server: ScriptedServer) -> None:
    traces: list[Trace] = []
    async with (
        AsyncClient(
            "http://scripted", transport=server, reconnect=None, on_event=traces.append, timeouts=Timeouts(total=60)
        ) as client,
        client.stream("hi") as stream,
    ):
        peer = await server.peer()
        (await peer.request()).accept()
        peer.drop()
        with pytest.raises(ConnectionLost):
            await stream.result()
    told = [(it.kind, type(it.message or it.error).__name__) for it in traces]
    assert told[0] == ("connected", "NoneType")
    assert told[-1] == ("lost", "ConnectionLost")
    assert sorted(told[1:-1]) == [
        ("received", "Accepted"),
        ("received", "Hello"),
        ("sent", "Generate"),
        ("sent", "Init"),
    ]
