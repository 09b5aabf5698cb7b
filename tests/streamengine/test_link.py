import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from compiled.step import Sampling
from streamengine.config import EngineConfig
from streamengine.link import (
    MAX_FRAME_BYTES,
    Abort,
    AskStatistics,
    Configure,
    CoreLink,
    Deltas,
    Failed,
    FromCore,
    FrontLink,
    LinkClosed,
    Progress,
    Ready,
    Statistics,
    Stop,
    Submit,
    ToCore,
    link_pair,
)
from streamengine.request import Delta, Finish, Request
from tests.fakes import fake_kv, fake_model

WAIT_S = 10.0

SUBMIT = Submit(
    Request(
        id=7,
        prompt=(1, 2, 3),
        max_tokens=5,
        sampling=Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=-(2**63)),
        stop_token_ids=(256,),
    )
)
TO_CORE: list[ToCore] = [Configure(EngineConfig(kv_pages=9)), SUBMIT, Abort(7, "client"), AskStatistics(), Stop()]
FROM_CORE: list[FromCore] = [
    Progress("weights", 1, 2),
    Ready(model=fake_model(), kv=fake_kv(), ledger={"weights": 1.5}),
    Deltas(
        (
            Delta(request=7, computed=3, queued_s=0.25),
            Delta(request=7, tokens=(8, 256), computed=3, finish=Finish("stop", "stop_token")),
        )
    ),
    Statistics({"running": 1.0}),
    Failed("startup", "no such model"),
]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    front, core = link_pair()
    with front, core:
        yield front, core


@contextmanager
def thread(target: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs ``target`` beside the block; afterwards the list holds what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(target())
        except Exception as error:
            outcome.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    yield outcome
    worker.join(WAIT_S)
    assert not worker.is_alive()


def frame(messages: object) -> bytes:
    body = msgspec.msgpack.encode(messages)
    return struct.pack("!I", len(body)) + body


# the core's end


def test_every_message_arrives_at_the_core_as_it_was_sent(sockets):
    front, core = sockets
    front.sendall(frame(TO_CORE))
    assert CoreLink(core).receive(block=True) == TO_CORE


def test_without_block_the_core_takes_what_is_there_and_does_not_wait(sockets):
    front, core = sockets
    link = CoreLink(core)
    assert link.receive(block=False) == []
    front.sendall(frame([Stop()]) + frame([AskStatistics(), Stop()]))
    assert link.receive(block=False) == [Stop(), AskStatistics(), Stop()]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
def test_half_a_frame_is_nothing_until_the_rest_is_there(sockets, cut):
    front, core = sockets
    link = CoreLink(core)
    data = frame([SUBMIT])
    front.sendall(data[:cut])
    assert link.receive(block=False) == []
    front.sendall(data[cut:] + data[:cut])
    assert link.receive(block=False) == [SUBMIT]
    front.sendall(data[cut:])
    assert link.receive(block=True) == [SUBMIT]


def test_a_blocked_core_wakes_up_with_the_first_message(sockets):
    front, core = sockets
    link = CoreLink(core)
    with thread(lambda: link.receive(block=True)) as outcome:
        front.sendall(frame([Stop()]))
    assert outcome == [[Stop()]]


def test_a_blocked_core_wakes_up_when_the_engine_goes(sockets):
    front, core = sockets
    link = CoreLink(core)
    with thread(lambda: link.receive(block=True)) as outcome:
        front.close()
    assert isinstance(outcome[0], LinkClosed)


def test_a_blocked_core_wakes_up_for_something_beside_its_messages_and_at_its_time(sockets):
    front, core = sockets
    link = CoreLink(core)
    beside, other = socket.socketpair()
    with beside, other:
        assert link.receive(block=True, beside=beside, most_s=0.001) == []
        with thread(lambda: link.receive(block=True, beside=beside)) as outcome:
            other.send(b"!")
        assert outcome == [[]]
        beside.recv(1)
        with thread(lambda: link.receive(block=True, beside=beside)) as outcome:
            front.sendall(frame([Stop()]))
        assert outcome == [[Stop()]]


def test_what_was_sent_before_the_end_is_still_received(sockets):
    front, core = sockets
    link = CoreLink(core)
    front.sendall(frame([Stop()]))
    front.close()
    assert link.receive(block=False) == [Stop()]
    with pytest.raises(LinkClosed, match="by the other end"):
        link.receive(block=False)


def test_an_end_in_the_middle_of_a_frame_is_said_to_be_one(sockets):
    front, core = sockets
    front.sendall(frame([Stop()])[:-1])
    front.close()
    with pytest.raises(LinkClosed, match="in the middle of a frame"):
        CoreLink(core).receive(block=True)


def test_sending_to_an_engine_that_is_gone_says_so(sockets):
    front, core = sockets
    front.close()
    with pytest.raises(LinkClosed):
        CoreLink(core).send(Statistics({}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("!I", MAX_FRAME_BYTES + 1), "out of step"),
        (frame([{"type": "unknown"}]), "cannot be decoded"),
        (frame(7), "cannot be decoded"),
        (b"\0\0\0\1\xc1", "cannot be decoded"),
    ],
)
def test_bytes_that_are_no_frame_end_the_link(sockets, data, reason):
    front, core = sockets
    front.sendall(data)
    with pytest.raises(LinkClosed, match=reason):
        CoreLink(core).receive(block=True)


# both ends


@pytest.mark.anyio
async def test_every_message_arrives_at_the_engine_as_it_was_sent(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    core_link = CoreLink(core)
    for message in FROM_CORE:
        core_link.send(message)
    with anyio.fail_after(WAIT_S):
        assert [await link.receive() for _ in FROM_CORE] == FROM_CORE
    await link.aclose()


@pytest.mark.anyio
async def test_posts_of_many_tasks_arrive_whole_and_in_each_ones_order(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    core_link = CoreLink(core)
    received: list[ToCore] = []

    async def poster(number: int) -> None:
        for i in range(50):
            link.post(Abort(i, f"{number}" * 3000))
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            for number in range(4):
                group.start_soon(poster, number)
            while len(received) < 200:
                received += await anyio.to_thread.run_sync(core_link.receive, True)
            await link.aclose()
    for number in range(4):
        assert [m.request for m in received if isinstance(m, Abort) and m.cause[0] == f"{number}"] == list(range(50))


@pytest.mark.anyio
async def test_what_is_posted_together_travels_in_one_frame(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    link.post(SUBMIT)
    link.post(Abort(7, "client"), Stop())
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            data = await anyio.to_thread.run_sync(core.recv, 65536)
            assert data == frame([SUBMIT, Abort(7, "client"), Stop()])
            await link.aclose()


@pytest.mark.anyio
async def test_a_post_from_another_thread_leaves_with_the_next_message_from_the_core(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    core_link = CoreLink(core)
    core_link.send(Statistics({}))
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(link.post, Abort(1, "client"))
            await link.receive()
            assert await anyio.to_thread.run_sync(core_link.receive, True) == [Abort(1, "client")]
            await link.aclose()


@pytest.mark.anyio
async def test_a_core_that_is_not_read_blocks_and_goes_on_when_it_is(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    core_link = CoreLink(core)
    large = Failed("engine_error", "x" * 2_000_000)  # more than the socket holds
    with thread(lambda: core_link.send(large)) as outcome, anyio.fail_after(WAIT_S):
        assert outcome == []
        assert await link.receive() == large
    assert outcome == [None]
    await link.aclose()


@pytest.mark.anyio
async def test_the_engine_sees_the_end_of_the_core_and_posting_is_harmless_afterwards(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    core_link = CoreLink(core)
    core_link.send(Failed("startup", "no such model"))
    core_link.close()
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            assert await link.receive() == Failed("startup", "no such model")
            with pytest.raises(LinkClosed):
                await link.receive()
            link.post(Stop())  # and the writer has returned: the group ends
    await link.aclose()


@pytest.mark.anyio
async def test_the_last_words_of_the_core_arrive_though_it_left_messages_unread(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    core_link = CoreLink(core)
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            link.post(Stop())
            await anyio.wait_all_tasks_blocked()
            core_link.send(Failed("engine_error", "3 steps in a row failed"))
            core_link.close()
            assert await link.receive() == Failed("engine_error", "3 steps in a row failed")
            with pytest.raises(LinkClosed):
                await link.receive()
    await link.aclose()


@pytest.mark.anyio
async def test_closing_the_engines_end_wakes_its_own_reader(sockets):
    front, _ = sockets
    link = await FrontLink.open(front)
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:

            async def read() -> None:
                with pytest.raises(LinkClosed):
                    await link.receive()

            group.start_soon(link.run_writer)
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await link.aclose()


@pytest.mark.anyio
async def test_a_message_that_cannot_travel_is_its_posters_error_and_the_link_goes_on(sockets):
    class Foreign(int):
        pass

    front, core = sockets
    link = await FrontLink.open(front)
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            with pytest.raises(TypeError):
                link.post(Stop(), Abort(Foreign(1), "client"))
            with pytest.raises(OverflowError):
                link.post(Abort(2**70, "client"))
            link.post(AskStatistics())
            assert await anyio.to_thread.run_sync(CoreLink(core).receive, True) == [AskStatistics()]
            await link.aclose()


@pytest.mark.anyio
async def test_a_long_outbox_leaves_in_frames_of_bounded_size(sockets):
    front, core = sockets
    link = await FrontLink.open(front)
    prompt = tuple(range(2**16, 2**16 + 40_000))
    posted = [Submit(Request(id=i, prompt=prompt, max_tokens=1, sampling=Sampling())) for i in range(20)]
    link.post(*posted)
    link.post(Stop())
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run_writer)
            (length,) = struct.unpack("!I", await anyio.to_thread.run_sync(core.recv, 4, socket.MSG_PEEK))
            assert length < 2 * 256 * 1024
            end = CoreLink(core)
            received: list[ToCore] = []
            while len(received) < 21:
                received += await anyio.to_thread.run_sync(end.receive, True)
            assert received == [*posted, Stop()]
            await link.aclose()
