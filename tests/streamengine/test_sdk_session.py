"""The SDK's client and the server's session, in memory: what one says is what the other understands."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine.log import Log
from streamengine.session import Session, TransportClosed
from streamengine_sdk import AsyncClient, Backoff, StreamLost, events
from streamengine_sdk.testing import MemoryPeer, MemoryTransport
from tests.sessions import PATIENCE_S, Hub, ScriptedEngine, end, hub, say

AT_ONCE = Backoff(first=1e-6, longest=1e-6)


class Engine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.taken = anyio.Event()

    async def submit(self, generate: Any) -> Log:
        log = await super().submit(generate)
        self.taken.set()
        return log


class Wires:
    """Every connection that the client opens ends in a session of its own."""

    def __init__(self, it: Hub, tasks: anyio.abc.TaskGroup) -> None:
        self.it = it
        self.peers: list[MemoryPeer] = []
        self._tasks = tasks

    def __call__(self, endpoint: object) -> MemoryTransport:
        return MemoryTransport(self._serve, closed=TransportClosed)

    def _serve(self, peer: MemoryPeer) -> None:
        self.peers.append(peer)
        self._tasks.start_soon(Session(self.it.streams, peer, self.it.config).run)

    def drop(self, code: int = 1006) -> None:
        self.peers[-1].drop(code)


@asynccontextmanager
async def wired(window: int = 1024, coalesce_ms: float = 0) -> AsyncIterator[tuple[Wires, AsyncClient, Engine]]:
    engine = Engine()
    async with hub(engine) as it, anyio.create_task_group() as tasks:
        wires = Wires(it, tasks)
        async with AsyncClient(
            "http://memory", transport=wires, reconnect=AT_ONCE, window=window, coalesce_ms=coalesce_ms
        ) as client:
            yield wires, client, engine
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    steps=st.lists(st.tuples(st.text(max_size=9), st.sampled_from([None, 1001, 1006, 1011, 1012])), max_size=8),
    window=st.integers(0, 6),
    restless=st.booleans(),
)
def test_what_was_generated_is_what_is_read_over_connections_that_drop(
    backend: str, steps: list[tuple[str, int | None]], window: int, restless: bool
) -> None:
    async def main() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with wired(window) as (wires, client, engine), client.stream("hi") as stream:
                if restless:
                    wires.drop()
                async with anyio.create_task_group() as tasks:

                    async def generate() -> None:
                        await engine.taken.wait()
                        for text, drop in steps:
                            say(engine.logs[0], text)
                            await anyio.lowlevel.checkpoint()
                            if drop is not None:
                                wires.drop(drop)
                        end(engine.logs[0])

                    tasks.start_soon(generate)
                    deltas = [event async for event in stream if isinstance(event, events.Delta)]
                expected = "".join(text for text, _ in steps)
                assert "".join(delta.text for delta in deltas) == expected
                assert (await stream.result()).text == expected
                assert len(engine.logs) == 1

    anyio.run(main, backend=backend)


@pytest.mark.anyio
async def test_a_break_cancels_and_so_does_a_client_that_leaves() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with wired() as (wires, client, engine), anyio.create_task_group() as tasks:

            async def generate() -> None:
                await engine.taken.wait()
                say(engine.logs[0], "abc")

            tasks.start_soon(generate)
            async for event in client.stream("hi"):
                if isinstance(event, events.Delta):
                    break
            await engine.aborted.wait()
            assert engine.aborts == [(engine.logs[0], "client")]
            engine.taken, engine.aborted = anyio.Event(), anyio.Event()
            async with AsyncClient("http://memory", transport=wires) as other:
                stream = other.stream("hi")
                await stream.__aenter__()
                await engine.taken.wait()
            await engine.aborted.wait()
            assert engine.aborts[-1][0] in engine.logs[1:]


@pytest.mark.anyio
async def test_another_client_resumes_by_id_and_position() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with wired() as (wires, client, engine), client.stream("hi") as stream:
            await engine.taken.wait()
            say(engine.logs[0], "Hello")
            assert await anext(stream.text) == "Hello"
            async with AsyncClient("http://memory", transport=wires) as other:
                assert stream.stream_id is not None
                async with other.resume(stream.stream_id, after=3) as resumed:
                    say(engine.logs[0], "!")
                    end(engine.logs[0])
                    assert (await resumed.result()).text == "lo!"
                with pytest.raises(StreamLost):
                    await other.resume("st_0123456789abcdef").result()
            assert (await stream.result()).text == "Hello!"


@pytest.mark.anyio
async def test_a_hundred_and_fifty_at_once_are_answered_though_the_server_takes_sixty_four() -> None:
    async with wired() as (_, client, engine), anyio.create_task_group() as tasks:
        texts: list[str] = []

        async def ask(number: int) -> None:
            texts.append((await client.generate(str(number))).text)

        with anyio.fail_after(PATIENCE_S):
            for number in range(150):
                tasks.start_soon(ask, number)
            await anyio.wait_all_tasks_blocked()
            assert len(engine.logs) == 64
            for number in range(150):
                while len(engine.logs) <= number:
                    await anyio.lowlevel.checkpoint()
                say(engine.logs[number], "x")
                end(engine.logs[number])
            while len(texts) < 150:
                await anyio.lowlevel.checkpoint()
        assert texts == ["x"] * 150
