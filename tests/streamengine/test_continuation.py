"""An answer whose server is gone goes on at another, as if nothing had happened: the SDK over sessions in memory."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from compiled.step import Runner, Step
from streamengine.config import ServerConfig
from streamengine.engine import Engine, Generate
from streamengine.errors import InvalidRequest, Overloaded, StreamEngineError, UnsupportedFeature
from streamengine.log import Log
from streamengine.sampling import SamplingParams
from streamengine.session import Session, TransportClosed
from streamengine.streams import Streams
from streamengine_sdk import AsyncClient, Backoff, ConnectError, EngineError, Result, StreamLost, Trace, wire
from streamengine_sdk.events import Delta, Value
from streamengine_sdk.testing import MemoryPeer, MemoryTransport
from tests.fakes import EOS, FakeHandle, FakeRunner, fake_kv, fake_model, script
from tests.serving import engine_over
from tests.streamengine.guided.drawn import runner_in
from tests.streamengine.guided.test_tools import HELLO, TOOLS

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
AT_ONCE = Backoff(first=1e-6, longest=1e-6)
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "tags": {"type": "array", "items": {"enum": ["a", 7]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
LENIENT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "s", "strict": False, "schema": {**SCHEMA, "not": {"required": ["other"]}}},
}
SEEDED: Any = {"seed": 7, "max_tokens": 24}
CASES: dict[str, Any] = {
    "greedy": {"temperature": 0, "seed": 5, "max_tokens": 12},
    "seeded with ids": {**SEEDED, "return_token_ids": True},
    "log-probabilities": {**SEEDED, "logprobs": True, "top_logprobs": 2},
    "a stop string": {"seed": 2, "max_tokens": 30, "stop": ['"-8', '1"]6', "-4[9"], "min_tokens": 9},
    "a stop string that is kept": {"seed": 8, "max_tokens": 30, "stop": ["13{b"], "include_stop_str_in_output": True},
    "a stop token": {"seed": 3, "max_tokens": 60, "stop_token_ids": [ord("b")]},
    "values": {"seed": 1, "max_tokens": 200, "output": SCHEMA},
    "a document that is closed": {"seed": 11, "max_tokens": 30, "output": SCHEMA, "close_document": True},
    "a lenient schema": {"seed": 1, "max_tokens": 200, "response_format": LENIENT},
    "calls": {"seed": 2, "max_tokens": 400, "tools": TOOLS, "tool_choice": "required", "messages": HELLO},
    "forced tokens": {"seed": 2, "response_format": {"type": "regex", "regex": "[ab]forced[12]end"}},
}

AHEAD = 6
"""Steps: more than tokens are ever held back for a stop string."""

STRIDES = {"a lenient schema": 9, "calls": 4, "values": 2}
"""Where a cut at each token would take seconds: a verdict costs a process."""


class Fleet:
    """Servers in memory, one after the other; each knows the streams that were begun at it, and no others."""

    def __init__(self, engine: Engine, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._engine = engine
        self._closed = self._refuses = False
        self._peers: list[MemoryPeer] = []
        self._sessions: list[Session] = []
        self._logs: list[Log] = []
        self._submit, engine.submit = engine.submit, self._noted  # type: ignore[method-assign]
        self._renew()

    def __call__(self, endpoint: object) -> MemoryTransport:
        if self._closed:
            raise ConnectError("nobody is there")
        return MemoryTransport(self._serve, closed=TransportClosed)

    def die(self) -> None:
        """The server is gone, and another is in its place."""
        self._renew()
        self._peers.pop().drop(1006)

    def drain(self, *, last: bool = False) -> None:
        """The server shuts down at the end of its patience: what runs is cut, and told so."""
        self._closed |= last
        for log in self._logs:
            self._engine.abort(log, "shutdown")
        self._sessions.pop().go_away("shutdown", 0)
        self._renew()

    def forget(self) -> None:
        """The server has lost its streams but not its name, as one behind the same address."""
        epoch = self._streams.epoch
        self.die()
        self._streams.epoch = epoch

    def refuse(self) -> None:
        """Nothing that is new is taken any more."""
        self._refuses = True

    async def _noted(self, generate: Generate) -> Log:
        if self._refuses:
            raise Overloaded("the queue is full")
        self._logs.append(await self._submit(generate))
        return self._logs[-1]

    def _renew(self) -> None:
        self._streams = Streams(self._engine, ServerConfig(linger_s=0))

    def _serve(self, peer: MemoryPeer) -> None:
        self._peers.append(peer)
        self._sessions.append(Session(self._streams, peer, ServerConfig()))
        self._tasks.start_soon(self._sessions[-1].run)


@asynccontextmanager
async def fleet(runner: Runner, **options: Any) -> AsyncIterator[tuple[AsyncClient, Fleet, Engine]]:
    with anyio.fail_after(PATIENCE_S):
        async with engine_over(runner)(lambda progress: None) as engine, anyio.create_task_group() as tasks:
            servers = Fleet(engine, tasks)
            client = AsyncClient("http://memory", transport=servers, **{"reconnect": AT_ONCE, "window": 1, **options})
            async with client:
                yield client, servers, engine
            tasks.cancel_scope.cancel()


def essence(result: Result) -> dict[str, Any]:
    """All but what is of one server: names, times, what its cache knew."""
    usage = result.usage and msgspec.structs.replace(result.usage, cached_tokens=0)
    fields = {name: getattr(result, name) for name in Result.__dataclass_fields__}
    calls = [(call.name, call.arguments) for call in result.tool_calls]
    return {**fields, "usage": usage, "tool_calls": calls, "timing": None, "stream_id": None, "continued": 0}


async def read(client: AsyncClient, asked: Any, cut: Any = lambda seq: None) -> tuple[Result, list[Any]]:
    """The result and the values; ``cut`` is called after each delta."""
    values = []
    async with client.stream(None if "messages" in asked else "hello", **asked) as stream:
        async for event in stream:
            if isinstance(event, Value):
                values.append((event.path, event.value))
            if isinstance(event, Delta):
                assert (event.tokens is msgspec.UNSET) != bool(asked.get("return_token_ids"))
                cut(event.seq)
        return await stream.result(), values


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", CASES)
async def test_a_cut_at_any_token_gives_the_same_answer(tmp_path: Path, name: str) -> None:
    async with fleet(runner_in(tmp_path)) as (client, servers, _):
        whole, values = await read(client, CASES[name])
        assert 8 < whole.seq < 100
        for place in range(1, whole.seq + 1, STRIDES.get(name, 1)):
            result, again = await read(client, CASES[name], lambda seq, at=place: servers.die() if seq == at else None)
            assert essence(result) == essence(whole)
            assert again == values
            assert result.continued <= 1
            assert result.timing is not None
            assert (place <= result.timing.continued_tokens) == bool(result.continued)


async def test_a_cut_at_every_token_gives_the_same_answer(tmp_path: Path) -> None:
    async with fleet(runner_in(tmp_path), continuations=100) as (client, servers, _):
        for name in ("seeded with ids", "values", "calls"):
            whole, values = await read(client, CASES[name])
            result, again = await read(client, CASES[name], lambda seq: servers.die())
            assert (essence(result), again) == (essence(whole), values)
            assert result.continued > whole.seq // 2


async def test_characters_and_stop_strings_across_the_seam_are_whole() -> None:
    text = "naïve – 世界 🌍🌍 – über STÖP"
    runner = FakeRunner(kv=fake_kv(2049, 16), model=fake_model(512), answer=script({"hello": text}))
    async with fleet(runner) as (client, servers, _):
        for stop, shown in ((None, text), (" STÖ", text[: text.index(" STÖ")]), (" STÖPP", text)):
            asked: Any = {"max_tokens": 100, "stop": stop} if stop else {"max_tokens": 100}
            whole, _ = await read(client, asked)
            assert whole.text == shown
            for place in range(1, whole.seq + 1, 1 if stop is None else 3):
                result, _ = await read(client, asked, lambda seq, at=place: servers.die() if seq == at else None)
                assert essence(result) == essence(whole)


async def test_an_answer_without_a_seed_goes_on_with_the_one_that_was_drawn(tmp_path: Path) -> None:
    traces: list[Trace] = []
    async with fleet(runner_in(tmp_path), on_event=traces.append) as (client, servers, _):
        result, _ = await read(client, {"max_tokens": 20}, lambda seq: servers.die() if seq == 9 else None)
        seeds = {trace.message.seed for trace in traces if isinstance(trace.message, wire.Accepted)}
        assert len(seeds) == 1
        whole, _ = await read(client, {"max_tokens": 20, "seed": seeds.pop()})
        assert (essence(result), result.continued) == (essence(whole), 1)


async def test_a_server_that_does_not_know_the_stream_any_more_continues_it(tmp_path: Path) -> None:
    async with fleet(runner_in(tmp_path)) as (client, servers, _):
        whole, _ = await read(client, SEEDED)
        result, _ = await read(client, SEEDED, lambda seq: servers.forget() if seq == 5 else None)
        assert (essence(result), result.continued) == (essence(whole), 1)


class Gated(FakeRunner):
    """Runs a few steps ahead of whoever reads, and no more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Semaphore(AHEAD)

    def submit(self, step: Step) -> FakeHandle:
        assert self.gate.acquire(timeout=PATIENCE_S)
        return super().submit(step)


@pytest.mark.parametrize("name", ["seeded with ids", "a stop string"])
async def test_what_a_server_cuts_when_it_shuts_down_goes_on_at_another(tmp_path: Path, name: str) -> None:
    plain = runner_in(tmp_path)
    runner = Gated(kv=plain.kv, model=plain.model, answer=plain.answer)
    async with fleet(runner) as (client, servers, _):

        def cut(place: int, seq: int) -> None:
            runner.gate.release()
            if seq == place:
                servers.drain()
                runner.gate.release(2)

        whole, _ = await read(client, CASES[name], partial(cut, 0))
        continued = 0
        for place in range(1, whole.seq - 8, 3):
            runner.gate = threading.Semaphore(AHEAD)
            result, _ = await read(client, CASES[name], partial(cut, place))
            assert essence(result) == essence(whole)
            continued += result.continued
        assert continued == len(range(1, whole.seq - 8, 3))


@pytest.mark.parametrize("reconnect", [Backoff(first=1e-6, longest=1e-6, cut=0.01), None])
async def test_what_a_server_cut_ends_as_it_was_cut_where_no_other_comes(
    tmp_path: Path, reconnect: Backoff | None
) -> None:
    plain = runner_in(tmp_path)
    runner = Gated(kv=plain.kv, model=plain.model, answer=plain.answer)
    async with fleet(runner, reconnect=reconnect) as (client, servers, _):

        def cut(seq: int) -> None:
            runner.gate.release()
            if seq == 5:
                servers.drain(last=True)
                runner.gate.release(2)

        result, _ = await read(client, {**SEEDED, "max_tokens": 60}, cut)
        assert (result.finish_reason, result.cause, result.continued) == ("cancelled", "shutdown", 0)
        assert 5 <= result.seq < 60
        assert result.usage is not None
        assert result.usage.completion_tokens == result.seq


async def test_what_a_server_cut_ends_as_it_was_cut_where_the_next_one_refuses_it(tmp_path: Path) -> None:
    plain = runner_in(tmp_path)
    runner = Gated(kv=plain.kv, model=plain.model, answer=plain.answer)
    async with fleet(runner, reconnect=Backoff(first=1e-6, longest=1e-6, cut=PATIENCE_S)) as (client, servers, _):

        def cut(seq: int) -> None:
            runner.gate.release()
            if seq == 5:
                servers.drain()
                servers.refuse()
                runner.gate.release(2)

        result, _ = await read(client, {**SEEDED, "max_tokens": 60}, cut)
        assert (result.finish_reason, result.cause, result.continued) == ("cancelled", "shutdown", 0)


@pytest.mark.parametrize(("most", "cuts"), [(0, 1), (2, 3)])
async def test_after_so_many_continuations_the_stream_is_lost_with_what_came(
    tmp_path: Path, most: int, cuts: int
) -> None:
    async with fleet(runner_in(tmp_path), continuations=most) as (client, servers, _):
        whole, _ = await read(client, SEEDED)
        with pytest.raises(StreamLost) as lost:
            await read(client, SEEDED, lambda seq: servers.die() if seq in (3, 6, 9) else None)
        partial = lost.value.partial
        assert partial is not None
        assert partial.continued == most
        assert whole.text.startswith(partial.text)
        assert 3 * cuts <= partial.seq < whole.seq


async def test_a_stream_that_another_client_began_is_lost(tmp_path: Path) -> None:
    async with fleet(runner_in(tmp_path)) as (client, servers, _), client.stream("hello", seed=1) as stream:
        await anext(stream.text)
        assert stream.stream_id
        other = AsyncClient("http://memory", transport=servers, reconnect=AT_ONCE, window=1)
        async with other, other.resume(stream.stream_id) as resumed:
            await anext(resumed.text)
            servers.die()
            with pytest.raises(StreamLost):
                await resumed.result()


async def test_prefixes_that_the_cache_knows_are_not_computed_again(tmp_path: Path) -> None:
    asked: Any = {"seed": 7, "max_tokens": 100}
    async with fleet(runner_in(tmp_path)) as (client, servers, engine):
        await read(client, asked, lambda seq: servers.die() if seq == 90 else None)
        counts = await engine.statistics()
        assert counts["prompt_tokens"] >= 2 * len("hello") + 90
        assert counts["prefix_hits"] >= 80


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"continues": ()}, "at least one id"),
        ({"continues": (300,)}, "no token"),
        ({"continues": (97,) * 5, "sampling": SamplingParams(max_tokens=4)}, "at most 4"),
        ({"continues": (97, EOS, 97)}, "token 2 of continues.*ends before it"),
        ({"continues": (97, 98, 99), "sampling": SamplingParams(stop=("ab",))}, "token 2 .*stop string"),
        ({"continues": (98, 99), "response_format": {"type": "regex", "regex": "[ab]x"}}, "token 1.*grammar"),
        ({"continues": (97,), "response_format": {"type": "regex", "regex": "[ab]x"}}, None),
        ({"continues": (97,), "sampling": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs cannot be combined"),
        ({"continues": (97,), "sampling": SamplingParams(n=2)}, "n cannot be combined"),
        ({"continues": (97,), "sampling": SamplingParams(beam_width=2)}, "beam_width cannot be combined"),
    ],
)
async def test_what_cannot_be_the_beginning_of_the_answer_is_refused(
    tmp_path: Path, asked: Any, why: str | None
) -> None:
    async with fleet(runner_in(tmp_path)) as (_, _, engine):
        if why is None:
            result = await engine.generate(Generate(prompt="hello", **asked).prompt, **asked)
            assert (result.text, result.finish_reason) == ("ax", "stop")
            return
        with pytest.raises(StreamEngineError, match=why) as refused:
            await engine.generate("hello", **asked)
        assert isinstance(refused.value, InvalidRequest | UnsupportedFeature)
        assert refused.value.param == "continues"
        counts = await engine.statistics()
        assert (counts["running"], counts["waiting"]) == (0, 0)


async def test_a_cancelled_request_is_not_begun_again(tmp_path: Path) -> None:
    async with fleet(runner_in(tmp_path)) as (client, servers, engine), client.stream("hello", seed=1) as stream:
        await anext(stream.text)
        servers.die()
        with pytest.raises(EngineError):
            await stream.cancel()
        assert (await engine.statistics())["engine_submitted"] == 1
