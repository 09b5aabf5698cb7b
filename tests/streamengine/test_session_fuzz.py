"""Whatever a client's wishes on delivery are and however often its connection dies: the text is whole, once.

The real session, streams and engine over a fake runner; the connection is in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled.step import Sampling
from streamengine.streams import ANONYMOUS
from tests.fakes import EOS, ByteTokenizer, formula, script
from tests.serving import engine_over, roomy_runner
from tests.sessions import Connected, Hub, Message, hub

PATIENCE_S = 30.0
PLENTY: Any = {"message_rate": 1e9, "ack_stall_s": 60}

deliveries = st.fixed_dictionaries(
    {
        "coalesce_ms": st.sampled_from([0, 0, 1]),
        "coalesce_tokens": st.sampled_from([1, 1, 3, 1024]),
        "window": st.sampled_from([0, 1, 2, 7, 64]),
        "token_ids": st.booleans(),
        "pad": st.sampled_from([0, 16]),
    }
)
# Bytes as a model gives them: whole characters, halves of them, and ids that write nothing.
replies = st.lists(
    st.one_of(st.text(min_size=1, max_size=4).map(str.encode), st.binary(min_size=1, max_size=3)),
    min_size=1,
    max_size=40,
).map(lambda parts: list(b"".join(parts))[:120])


@dataclass
class Reading:
    """What a client knows of one stream."""

    id: str
    prompt: str
    delivery: Message
    stream: str = ""
    seq: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    done: Message | None = None

    def take(self, message: Message) -> None:
        assert self.done is None, f"{message} after the terminal"
        match message["type"]:
            case "accepted":
                assert message["after"] == self.seq
                assert self.stream in ("", message["stream"])
                self.stream = message["stream"]
            case "delta":
                assert message["seq"] - message.get("n", 1) == self.seq, f"{message} after {self.seq}"
                self.seq = message["seq"]
                self.text += message["text"]
                self.tokens += message.get("tokens", [])
            case "done":
                assert message["seq"] == self.seq + 1
                data = self.text.encode()
                assert message["check"] == {"bytes": len(data), "crc32": crc32(data)}
                self.done = message
            case "error":
                raise AssertionError(message)


class FragileClient:
    """Reads several streams over connections that it drops every few messages."""

    def __init__(self, it: Hub, readings: list[Reading], random: Random, kill_every: int, batch: bool) -> None:
        self._hub = it
        self._open = {reading.id: reading for reading in readings}
        self._random = random
        self._kill_every = kill_every
        self._batch = batch

    async def run(self) -> None:
        while self._open:
            connected = self._hub.connect()
            await self._talk(connected, self._random.randint(1, self._kill_every))
            connected.client.disconnect(self._random.choice([1001, 1006]))

    async def _talk(self, connected: Connected, messages: int) -> None:
        client = connected.client
        if self._batch:
            client.send("init", batch=True)
        for reading in self._open.values():
            if reading.stream:
                client.send(
                    "attach", id=reading.id, stream=reading.stream, after=reading.seq, delivery=reading.delivery
                )
            else:
                key = f"key-{reading.id}-{reading.prompt}"
                client.generate(
                    reading.id, prompt=reading.prompt, key=key, delivery=reading.delivery, temperature=0, max_tokens=200
                )
        while messages and self._open:
            message = await client.next("hello", "heartbeat")
            # Not those that would let a connection die before it has brought anything, for ever.
            messages -= message["type"] in ("delta", "done")
            reading = self._open[message["id"]]
            reading.take(message)
            if message["type"] == "delta" and reading.delivery["window"]:
                client.send("ack", id=reading.id, seq=message["seq"])
            if reading.done:
                del self._open[reading.id]


@settings(max_examples=40)
@given(
    answers=st.lists(replies, min_size=1, max_size=4),
    wishes=st.lists(deliveries, min_size=4, max_size=4),
    seed=st.integers(0, 1000),
    kill_every=st.sampled_from([1, 3, 20]),
    batch=st.booleans(),
)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_any_delivery_over_dying_connections_gives_the_whole_text_once(
    backend: str, answers: list[list[int]], wishes: list[Message], seed: int, kill_every: int, batch: bool
) -> None:
    prompts = [f"prompt {number}:" for number in range(len(answers))]
    runner = roomy_runner(answer=script(dict(zip(prompts, answers, strict=True))))
    readings = [
        Reading(f"r{number}", prompt, wish) for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=False))
    ]

    async def main() -> None:
        async with engine_over(runner)(lambda progress: None) as engine, hub(engine, **PLENTY) as it:
            with anyio.fail_after(PATIENCE_S):
                await FragileClient(it, readings, Random(seed), kill_every, batch).run()
            assert (await engine.statistics())["engine_open"] == 0

    anyio.run(main, backend=backend)
    for reading, reply in zip(readings, answers, strict=True):
        assert reading.text == ByteTokenizer().decode(reply)
        assert reading.done is not None
        assert reading.done["finish_reason"] == "stop"
        if reading.delivery["token_ids"]:
            assert reading.tokens == [*reply, EOS]


async def held_pages(engine: Any) -> float:
    return (await engine.statistics())["kv_pages_used"]


@pytest.mark.anyio
async def test_pages_are_back_before_a_cancel_is_answered() -> None:
    runner = roomy_runner()

    def stop_after_some(context: Sequence[int], sampling: Sampling) -> int:
        if len(context) == len("hello") + 5:
            runner.hold()
        return formula(context, sampling)

    runner.answer = stop_after_some
    async with engine_over(runner)(lambda progress: None) as engine, hub(engine) as it:
        client = it.connect().client
        for _ in range(20):
            client.generate("r1", max_tokens=200)
            await client.until("delta", "r1")
            client.send("cancel", id="r1")
            await anyio.wait_all_tasks_blocked()
            runner.release()
            done = (await client.until("done", "r1"))[-1]
            assert await held_pages(engine) == 0
            assert (done["finish_reason"], done["cause"]) == ("cancelled", "client")


@pytest.mark.anyio
async def test_a_stream_that_nobody_comes_back_to_gives_its_pages_back() -> None:
    runner = roomy_runner()
    async with engine_over(runner)(lambda progress: None) as engine, hub(engine, linger_s=0.05) as it:
        connected = it.connect()
        runner.hold()
        connected.client.generate("r1", max_tokens=200)
        accepted = (await connected.client.until("accepted", "r1"))[-1]
        await connected.left(1006)
        await anyio.to_thread.run_sync(runner.holding.wait, PATIENCE_S)
        record = it.streams.find(accepted["stream"], ANONYMOUS)
        it.streams.expire(anyio.current_time() + 1)
        runner.release()
        with anyio.fail_after(PATIENCE_S):
            while not record.log.ended:
                await anyio.wait_all_tasks_blocked()
        assert record.log.outcome is not None
        assert record.log.outcome.cause == "disconnect"
        assert await held_pages(engine) == 0
