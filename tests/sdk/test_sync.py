"""The client without ``async``: same objects, and nothing of it left when it is closed."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from streamengine_sdk import Client, ConnectionLost, SyncStream, Timeout, Timeouts, events
from streamengine_sdk.testing import FakeServer

PATIENCE_S = 5.0


def endless() -> Iterator[str]:
    while True:
        yield "x"


@pytest.fixture
def server() -> FakeServer:
    return FakeServer(lambda request: endless() if request.prompt == "forever" else (request.prompt or "").split())


@pytest.fixture(params=["asyncio", "trio"])
def client(server: FakeServer, request: pytest.FixtureRequest) -> Client:
    # With a small window the server has soon nothing more to say, so that nothing else wakes the client.
    return Client("http://fake", transport=server, backend=request.param, window=2)


def expect_cancel(server: FakeServer) -> None:
    """Something that another thread does soon."""
    end = time.monotonic() + PATIENCE_S
    while not server.cancelled:
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def test_events_text_result_and_ping(client: Client) -> None:
    with client:
        seen = list(client.stream("to be"))
        assert [type(event) for event in seen] == [events.Delta, events.Delta, events.Done]
        with client.stream("to be") as stream:
            assert list(stream.text) == ["to", "be"] and stream.snapshot == "tobe" and stream.seq == 2
            assert stream.result().text == "tobe"
            assert stream.stream_id
        assert client.generate("or not").text == "ornot"
        assert list(client.resume(stream.stream_id, after=1).text) == ["be"]
        assert client.ping() < PATIENCE_S


@pytest.mark.parametrize("way", ["break", "block", "drop", "text", "cancel"])
def test_every_way_to_leave_cancels(client: Client, server: FakeServer, way: str) -> None:
    with client:
        match way:
            case "break":
                for _ in client.stream("forever"):
                    break
            case "text":
                for _ in client.stream("forever").text:
                    break
            case "block":
                with client.stream("forever") as stream:
                    next(stream.text)
            case "drop":
                held = client.stream("forever")
                next(iter(held))
                del held
                gc.collect()
            case "cancel":
                with client.stream("forever") as stream:
                    next(stream.text)
                    assert stream.cancel().finish_reason == "cancelled"
        expect_cancel(server)


def test_several_threads_share_one_client(client: Client, server: FakeServer) -> None:
    texts: list[str] = []
    with client:
        threads = [threading.Thread(target=lambda: texts.append(client.generate("a b").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert texts == ["ab"] * 8
    assert len(server.requests) == 8


def test_errors_are_the_same_and_single(client: Client) -> None:
    with client, pytest.raises(Timeout) as caught:
        client.stream("forever", timeouts=Timeouts(total=0.01)).result()
    assert caught.value.partial is not None
    assert set(caught.value.partial.text) <= {"x"}


def test_a_closed_client_leaves_no_thread_and_ends_its_streams(client: Client) -> None:
    before = threading.active_count()
    with client:
        stream = client.stream("forever")
        next(iter(stream))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with pytest.raises(RuntimeError):
        stream.result()
    with pytest.raises(RuntimeError, match="not open"):
        client.generate("hi")
    del stream
    gc.collect()


def test_an_exception_and_an_interrupt_come_out_as_they_are(server: FakeServer) -> None:
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error), Client("http://fake", transport=server) as client:
            next(iter(client.stream("forever")))
            raise error


def test_a_client_that_is_closed_by_another_thread_ends_a_wait(client: Client) -> None:
    ended: list[Exception] = []

    def wait(stream: SyncStream) -> None:
        try:
            stream.result()
        except Exception as error:
            ended.append(error)

    with client:
        stream = client.stream("forever", max_tokens=None)
        next(iter(stream))
        thread = threading.Thread(target=wait, args=[stream])
        thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert isinstance(ended[0], ConnectionLost | RuntimeError)
