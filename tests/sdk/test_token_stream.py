"""One answer in the client: its events, its text, its end, and all the ways to leave it early."""

import gc
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest
from msgspec import UNSET

from streamengine_sdk import (
    AsyncClient,
    ConnectionLost,
    EngineFailed,
    ProtocolError,
    RequestError,
    Result,
    Timeout,
    Timeouts,
    TokenStream,
    events,
    wire,
)
from tests.sdk.scripted import PATIENCE_S, Answer, Peer, ScriptedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def client(server: ScriptedServer) -> AsyncClient:
    return AsyncClient("http://scripted", transport=server, reconnect=None)


async def opened(server: ScriptedServer, stream: TokenStream) -> tuple[Peer, Answer]:
    """The server's side of a stream that was just entered, accepted and with its first two tokens."""
    peer = await server.peer()
    answer = (await peer.request()).accept()
    answer.delta("Hello")
    answer.delta(" world")
    return peer, answer


async def expect_cancel(peer: Peer, answer: Answer) -> None:
    assert await peer.heard() == wire.Cancel(id=answer.id)


async def test_a_stream_yields_progress_then_deltas_then_one_done(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        assert answer.request.prompt == "hi"
        answer.progress(phase="queued", queue_position=2)
        answer.delta("Hello")
        answer.delta(" world", n=3)
        answer.done("length", timing=wire.Timing(ttft_ms=5.0))
        seen = [event async for event in stream]
    match seen:
        case [
            events.Progress(phase="queued", queue_position=2),
            events.Delta(text="Hello", seq=1),
            events.Delta(text=" world", seq=4, n=3),
            events.Done(finish_reason="length"),
        ]:
            pass
        case _:
            pytest.fail(f"unexpected events: {seen}")


async def test_the_result_holds_everything_about_the_answer(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream(messages=[{"role": "user", "content": "hi"}], return_token_ids=True) as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        assert answer.request.delivery.token_ids
        answer.delta("Hello", tokens=[7])
        answer.delta(" world", n=2, tokens=[8, 9])
        answer.done("stop", stop_sequence="!", timing=wire.Timing(ttft_ms=5.0))
        assert await stream.result() == Result(
            text="Hello world",
            seq=3,
            token_ids=(7, 8, 9),
            usage=wire.Usage(prompt_tokens=3, completion_tokens=3, total_tokens=6),
            timing=wire.Timing(ttft_ms=5.0),
            finish_reason="stop",
            stop_sequence="!",
            stream_id="st_00000000000000000000r1",
        )


async def test_the_result_is_whole_after_and_beside_an_iteration(server: ScriptedServer, client: AsyncClient) -> None:
    results: list[Result] = []
    async with client, client.stream("hi") as stream, anyio.create_task_group() as tasks:
        _, answer = await opened(server, stream)

        async def wait_for_the_end() -> None:
            results.append(await stream.result())

        tasks.start_soon(wait_for_the_end)
        answer.done()
        texts = [text async for text in stream.text]
        results.append(await stream.result())
    assert texts == ["Hello", " world"]
    assert [result.text for result in results] == ["Hello world", "Hello world"]


async def test_text_is_whole_characters_and_never_empty_and_snapshot_is_what_was_taken(
    server: ScriptedServer, client: AsyncClient
) -> None:
    pieces = ["Zoë ", "", "北京", "🇫🇷", "\u0000"]
    async with client, client.stream("hi") as stream:
        answer = (await (await server.peer()).request()).accept()
        for piece in pieces:
            answer.delta(piece)
        answer.done()
        taken = ""
        async for text in stream.text:
            assert text
            taken += text
            assert stream.snapshot == taken
        assert taken == "".join(pieces) == (await stream.result()).text


async def test_generate_is_the_result_of_a_stream(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, anyio.create_task_group() as tasks:

        async def serve() -> None:
            answer = await (await server.peer()).request()
            assert answer.request.max_tokens == 1
            answer.accept().delta("4")
            answer.done("length")

        tasks.start_soon(serve)
        assert (await client.generate("2+2=", max_tokens=1)).text == "4"


# leaving early


async def test_breaking_out_of_a_bare_loop_cancels_at_once(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, anyio.create_task_group() as tasks:

        async def serve() -> None:
            peer = await server.peer()
            answer = (await peer.request()).accept()
            answer.delta("Hello")
            await expect_cancel(peer, answer)

        tasks.start_soon(serve)
        async for event in client.stream("hi"):
            if isinstance(event, events.Delta):
                break


async def test_breaking_out_of_the_bare_text_cancels_at_once(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, anyio.create_task_group() as tasks:

        async def serve() -> None:
            peer = await server.peer()
            answer = (await peer.request()).accept()
            answer.delta("Hello")
            await expect_cancel(peer, answer)

        tasks.start_soon(serve)
        async for _ in client.stream("hi").text:
            break


async def test_leaving_the_managed_form_cancels_and_ends_the_iteration(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client:
        async with client.stream("hi") as stream:
            peer, answer = await opened(server, stream)
            async for _ in stream:
                break
            assert len(peer.received) == 0  # a loop may be gone on with; the block may not
        await expect_cancel(peer, answer)
        answer.done("cancelled", cause="client")
        assert [event async for event in stream] == []
        result = await stream.result()
        assert (result.text, result.finish_reason, result.cause) == ("Hello world", "cancelled", "client")


async def test_an_exception_in_the_body_cancels_and_comes_out_as_it_is(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client:
        stream = client.stream("hi")

        async def read_and_fail() -> None:
            async with stream:
                async for _ in stream:
                    raise KeyError

        async def serve() -> None:
            peer, answer = await opened(server, stream)
            await expect_cancel(peer, answer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            with pytest.raises(KeyError):
                await read_and_fail()


async def test_an_exception_in_a_bare_loop_cancels(server: ScriptedServer, client: AsyncClient) -> None:
    async def read_and_fail() -> None:
        async for _ in client.stream("hi"):
            raise KeyError

    async with client, anyio.create_task_group() as tasks:

        async def serve() -> None:
            peer = await server.peer()
            answer = (await peer.request()).accept()
            answer.delta("Hello")
            await expect_cancel(peer, answer)

        tasks.start_soon(serve)
        try:
            await read_and_fail()
        except KeyError as error:
            error.__traceback__ = None  # a traceback holds the loop's frame, and that the stream


@pytest.mark.parametrize("managed", [True, False])
async def test_a_cancelled_scope_cancels_the_request(
    server: ScriptedServer, client: AsyncClient, managed: bool
) -> None:
    async with client, anyio.create_task_group() as tasks:
        stream = client.stream("hi")

        async def read() -> None:
            if managed:
                async with stream:
                    await stream.result()
            else:
                async for _ in stream:
                    pass

        tasks.start_soon(read)
        peer, answer = await opened(server, stream)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await expect_cancel(peer, answer)


async def test_a_cancelled_scope_stops_a_loop_that_never_has_to_wait(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        peer, answer = await opened(server, stream)
        await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as scope:
            scope.cancel()
            async for _ in stream:
                pytest.fail("an event was taken in a cancelled scope")
        assert scope.cancelled_caught
        await expect_cancel(peer, answer)


async def test_an_error_that_is_raised_again_and_again_stays_short(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        (await (await server.peer()).request()).error("internal")
        depths = []
        for _ in range(3):
            with pytest.raises(EngineFailed) as caught:
                await stream.result()
            depths.append(len(caught.traceback))
        assert depths[0] == depths[1] == depths[2]
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


async def test_a_deadline_around_generate_cancels_the_request(server: ScriptedServer, client: AsyncClient) -> None:
    async with client:
        with anyio.move_on_after(0.02) as scope:
            await client.generate("hi")
        assert scope.cancelled_caught
        peer = await server.peer()
        await expect_cancel(peer, await peer.request())


async def test_cancel_from_another_task_returns_the_done_and_ends_the_iteration(
    server: ScriptedServer, client: AsyncClient
) -> None:
    done: list[wire.Done] = []
    async with client, client.stream("hi") as stream, anyio.create_task_group() as tasks:
        peer, answer = await opened(server, stream)

        async def cancel() -> None:
            done.append(await stream.cancel())

        async def serve() -> None:
            await expect_cancel(peer, answer)
            answer.done("cancelled", cause="client")

        seen = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 2:
                tasks.start_soon(cancel)
                tasks.start_soon(serve)
    assert isinstance(seen[-1], events.Done)
    assert done == [seen[-1]]
    assert len(peer.received) == 0  # leaving the block does not cancel a second time


async def test_cancel_after_the_end_returns_the_done_and_sends_nothing(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        peer, answer = await opened(server, stream)
        answer.done()
        await stream.result()
        assert (await stream.cancel()).finish_reason == "stop"
        assert len(peer.received) == 0


async def test_a_stream_that_was_never_used_sends_nothing(server: ScriptedServer, client: AsyncClient) -> None:
    async with client:
        client.stream("hi")
        stream = client.stream("hi")
        await stream.aclose()
        assert [event async for event in stream] == []
        with pytest.raises(anyio.ClosedResourceError):
            await stream.result()
    assert server.endpoints == []


async def test_a_stream_collected_in_another_thread_is_cancelled_with_the_next_message(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client:
        held = [client.stream("hi")]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(held[0].__anext__)
            peer, answer = await opened(server, held[0])
        await anyio.to_thread.run_sync(held.clear)
        gc.collect()
        peer.say(wire.Heartbeat())
        await expect_cancel(peer, answer)


async def test_a_stream_that_outlives_its_client_is_collected_quietly(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client:
        stream = client.stream("hi")
        await stream.__aenter__()
    del stream
    gc.collect()


# what a client checks


def gap(answer: Answer) -> None:
    answer.delta("!", skip=1)


def repeat(answer: Answer) -> None:
    answer.seq -= 1
    answer.delta("!")


def empty_delta(answer: Answer) -> None:
    answer._peer.say({"type": "delta", "id": answer.id, "seq": answer.seq, "n": 0, "text": "!"})


def end_too_early(answer: Answer) -> None:
    answer.done(seq=answer.seq + 2)


def wrong_length(answer: Answer) -> None:
    answer.done(check=wire.Check(bytes=10, crc32=0x8BD69E52))


def wrong_checksum(answer: Answer) -> None:
    answer.done(check=wire.Check(bytes=11, crc32=1))


@pytest.mark.parametrize("fault", [gap, repeat, empty_delta, end_too_early, wrong_length, wrong_checksum])
async def test_a_server_that_breaks_the_protocol_is_found_out(
    server: ScriptedServer, client: AsyncClient, fault: Callable[[Answer], None]
) -> None:
    async with client, client.stream("hi") as stream:
        _, answer = await opened(server, stream)
        fault(answer)
        with pytest.raises(ProtocolError) as caught:
            _ = [event async for event in stream]
        assert caught.value.partial is not None
        assert caught.value.partial.text == "Hello world"


async def test_after_a_gap_the_request_is_cancelled_and_others_go_on(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("one") as one, client.stream("two") as two:
        peer = await server.peer()
        first, second = (await peer.request()).accept(), (await peer.request()).accept()
        gap(first)
        with pytest.raises(ProtocolError):
            await one.result()
        await expect_cancel(peer, first)
        first.done("cancelled")
        second.delta("fine")
        second.done()
        assert (await two.result()).text == "fine"


async def test_missing_token_ids_are_found_out(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi", return_token_ids=True) as stream:
        answer = (await (await server.peer()).request()).accept()
        answer.delta("Hello", n=2, tokens=[1])
        with pytest.raises(ProtocolError, match="2 tokens holds 1 ids"):
            await stream.result()


async def test_log_probabilities_are_in_the_events_and_whole_in_the_result(
    server: ScriptedServer, client: AsyncClient
) -> None:
    items = [
        wire.Logprob(token=1, text="He", logprob=-0.5, top=[wire.Logprob(token=1, text="He", logprob=-0.5)]),
        wire.Logprob(token=2, b64="4oI=", logprob=-1.0),
        wire.Logprob(token=3, b64="rA==", logprob=-0.25),
    ]
    async with client, client.stream("hi", logprobs=True, top_logprobs=1) as stream:
        answer = (await (await server.peer()).request()).accept()
        assert (answer.request.logprobs, answer.request.top_logprobs) == (True, 1)
        answer.delta("He", logprobs=items[:1])
        answer.delta("€", n=2, logprobs=items[1:])
        answer.done()
        deltas = [event.logprobs async for event in stream if isinstance(event, wire.Delta)]
        assert deltas == [items[:1], items[1:]]
        assert (await stream.result()).logprobs == tuple(items)


async def test_missing_log_probabilities_are_found_out(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi", logprobs=True) as stream:
        (await (await server.peer()).request()).accept().delta("Hello")
        with pytest.raises(ProtocolError, match="1 tokens holds 0 log-probabilities"):
            await stream.result()


async def test_nothing_is_seen_after_the_one_terminal(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        peer, answer = await opened(server, stream)
        answer.done()
        answer.delta("more")
        answer.done()
        answer.error("internal")
        seen = [event async for event in stream]
        assert sum(isinstance(event, events.Done) for event in seen) == 1
        assert (await stream.result()).text == "Hello world"
        peer.say(wire.Heartbeat())
        async with client.stream("again") as other:
            again = (await peer.request()).accept()
            again.done()
            assert (await other.result()).text == ""


# ends that are no done


async def test_a_lost_connection_is_raised_after_what_had_arrived(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        peer, _ = await opened(server, stream)
        peer.drop(1012, "restart")
        assert [await anext(stream.text) for _ in range(2)] == ["Hello", " world"]
        with pytest.raises(ConnectionLost, match="1012 restart") as caught:
            await anext(stream)
        assert caught.value.close_code == 1012
        assert caught.value.partial == Result(text="Hello world", seq=2, stream_id="st_00000000000000000000r1")
        with pytest.raises(ConnectionLost):
            await stream.result()
        with pytest.raises(ConnectionLost):
            await stream.cancel()


async def test_an_error_carries_usage_and_text_so_far(server: ScriptedServer, client: AsyncClient) -> None:
    usage = wire.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
    async with client, client.stream("hi") as stream:
        _, answer = await opened(server, stream)
        answer.error("engine_error", usage=usage, seq=2)
        with pytest.raises(EngineFailed, match="it is engine_error") as caught:
            await stream.result()
        assert caught.value.partial == Result(text="Hello world", seq=2, usage=usage, stream_id=stream.stream_id)


async def test_a_refused_message_ends_the_request_that_it_asked_for(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        answer = await (await server.peer()).request()
        answer.error("invalid_message", 400, id=UNSET, ref=answer.id)
        with pytest.raises(RequestError):
            await stream.result()


async def test_an_error_about_a_message_leaves_the_running_request_alone(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi") as stream:
        _, answer = await opened(server, stream)
        answer.error("duplicate_id", 409, id=UNSET, ref=answer.id)
        answer.done()
        assert (await stream.result()).text == "Hello world"


# deadlines


@pytest.mark.parametrize(
    ("kind", "timeouts", "tokens"),
    [
        ("first_token", Timeouts(first_token=0.02), 0),
        ("between", Timeouts(between=0.02), 2),
        ("total", Timeouts(total=0.02), 2),
        ("total", Timeouts(total=0.02), 0),
    ],
)
@pytest.mark.parametrize("by", ["iteration", "result"])
async def test_a_deadline_that_passes_cancels_and_names_itself(
    server: ScriptedServer, client: AsyncClient, kind: str, timeouts: Timeouts, tokens: int, by: str
) -> None:
    async with client, client.stream("hi", timeouts=timeouts) as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        answer.progress(phase="prefill")
        for _ in range(tokens):
            answer.delta("x")

        async def iterate() -> None:
            async for _ in stream:
                peer.say(wire.Heartbeat())  # no token, so it does not count

        with anyio.fail_after(PATIENCE_S), pytest.raises(Timeout) as caught:
            await (stream.result() if by == "result" else iterate())
        assert caught.value.kind == kind
        assert caught.value.partial is not None
        assert caught.value.partial.text == "x" * tokens
        await expect_cancel(peer, answer)
        answer.done("cancelled")  # too late, and no longer wanted
        with pytest.raises(Timeout):
            await stream.result()


async def test_a_total_deadline_holds_where_tokens_come_faster_than_they_are_taken(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("hi", timeouts=Timeouts(total=0.02)) as stream:
        _, answer = await opened(server, stream)
        for _ in range(1000):
            answer.delta("x")

        async def read_slowly() -> None:
            async for _ in stream:
                await anyio.sleep(0.001)

        with pytest.raises(Timeout, match="total"):
            await read_slowly()


async def test_a_slow_reader_is_no_slow_server(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi", timeouts=Timeouts(first_token=0.5, between=0.5)) as stream:
        _, answer = await opened(server, stream)
        answer.done()
        await anyio.sleep(1)
        assert (await stream.result()).text == "Hello world"
        assert stream.snapshot == ""


async def test_the_queue_deadline_is_the_servers(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi", timeouts=Timeouts(queue=2)):
        answer = await (await server.peer()).request()
        assert answer.request.timeouts == wire.Timeouts(queue_s=2)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_that_has_always_passed_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="between must be above 0"):
        Timeouts(between=seconds)
