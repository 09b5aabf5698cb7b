"""The clients of the soak: two hundred, of ten kinds, each visit by a seed of its own."""

import itertools
import json
import random
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute

from streamengine_sdk import AsyncClient, Backoff, EngineError, Timeouts, TransportClosed, events
from streamengine_sdk.transport import Endpoint, WebSocketTransport
from tests.fakes import oracle

ARRIVAL_S = 5.0
PATIENCE = Timeouts(connect=30)
"""A machine with two cores is slow to accept two hundred."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER by which closing a socket resets it."""
BROKEN = (
    b"\x81\x05hello",
    b"\x83\x80aaaa",
    b"\xff\xff\xff\xff",
    b"\x81\x82\0\0\0\0\xff\xfe",
    b"\x81\xff" + b"\xff" * 12,
)
"""Frames that are unmasked, of no known kind, of reserved bits, not UTF-8, and of a size beyond everything."""
SENSELESS = (
    "{",
    "[]",
    '{"type":"dance"}',
    '{"type":"generate","id":"a","prompt":"x","temprature":1}',
    '{"type":"ack"}',
)


class Crowd:
    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.visits: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.faults: list[str] = []
        self.gaps: list[float] = []
        self.streams = self.tokens = self.attached = 0

    async def live(self, number: int, role: Callable[["Crowd", random.Random], Awaitable[None]], polite: bool) -> None:
        """One visit after the other, each by a seed of its own."""
        for visit in itertools.count():
            chance = random.Random(f"{self.seed} {number} {visit}")
            try:
                await anyio.sleep(chance.random() * (0.2 if visit else ARRIVAL_S))
                with anyio.fail_after(60):
                    await role(self, chance)
            except (EngineError, OSError, TransportClosed, TimeoutError, AssertionError, *GONE) as error:
                code = getattr(error, "code", "")
                self.errors[str(code or type(error).__name__)] += 1
                if polite or isinstance(error, AssertionError | TimeoutError) or code in ("internal", "engine_error"):
                    self.faults.append(f"{role.__name__}, visit {visit} of {number}: {type(error).__name__} {error}")
            self.visits[role.__name__] += 1

    def report(self) -> dict[str, Any]:
        cuts = statistics.quantiles(self.gaps, n=100) if len(self.gaps) > 1 else [0.0] * 99
        return {
            "visits": self.visits,
            "errors": self.errors,
            "faults": self.faults[:20],
            "streams": self.streams,
            "tokens": self.tokens,
            "attached": self.attached,
            "p50": cuts[49] * 1e3,
            "p99": cuts[98] * 1e3,
        }


GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Raw(WebSocketTransport):
    """A connection whose socket can be had as well."""

    socket: ByteStream

    def __init__(self, crowd: Crowd | Endpoint) -> None:
        self.crowd = crowd
        super().__init__(crowd if isinstance(crowd, Endpoint) else Endpoint.parse(crowd.url), dial=self._connect)

    async def _connect(self, endpoint: Endpoint) -> ByteStream:
        self.socket = await dial(endpoint.url)
        return self.socket

    async def __aenter__(self) -> "Raw":
        await self.connect()
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    async def say(self, type: str, **fields: Any) -> None:
        await self.send(json.dumps({"type": type, **fields}))

    async def generate(self, chance: random.Random, tokens: int = 100, **delivery: Any) -> None:
        prompt = prompt_of(chance)
        await self.say("generate", id="r", prompt=prompt, max_tokens=tokens, temperature=0, delivery=delivery)

    async def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self.receive())
        if message["type"] == "error" and isinstance(self.crowd, Crowd):
            self.crowd.errors[message["code"]] += 1
            assert message["code"] not in ("internal", "engine_error"), message
        return message

    async def hear_deltas(self, count: int) -> None:
        while count > 0:
            message = await self.hear()
            count -= message["type"] == "delta"
            if message["type"] in ("done", "error"):
                return

    async def reset(self) -> None:
        await reset(self.socket)


async def dial(url: str) -> ByteStream:
    host, _, port = url.split("/")[2].rpartition(":")
    return await anyio.connect_tcp(host, int(port))


async def reset(stream: ByteStream) -> None:
    sock = stream.extra(SocketAttribute.raw_socket)
    if sock.fileno() >= 0:  # the server may have been first
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    await anyio.aclose_forcefully(stream)


def prompt_of(chance: random.Random) -> str:
    return "".join(chance.choices("abcdefgh ", k=chance.randint(1, 20)))


async def behaved(crowd: Crowd, chance: random.Random) -> None:
    """Reads whole answers, which must be right."""
    async with AsyncClient(crowd.url, timeouts=PATIENCE) as client:
        await _read_right(crowd, client, chance)


async def reconnecting(crowd: Crowd, chance: random.Random) -> None:
    """The same over a connection that is reset again and again: the SDK attaches, and nothing is lost."""
    made: list[Raw] = []

    def transport(endpoint: Endpoint) -> Raw:
        made.append(Raw(endpoint))
        return made[-1]

    async def cut() -> None:
        if chance.random() < 0.05:
            await made[-1].reset()

    backoff = Backoff(first=0.01, longest=0.1)
    async with AsyncClient(crowd.url, timeouts=PATIENCE, transport=transport, reconnect=backoff) as client:
        await _read_right(crowd, client, chance, cut)
    crowd.attached += len(made) - 1


async def _read_right(
    crowd: Crowd, client: AsyncClient, chance: random.Random, cut: Callable[[], Awaitable[None]] | None = None
) -> None:
    prompt, tokens, last = prompt_of(chance), chance.randint(10, 100), 0.0
    begun = time.perf_counter()
    async with client.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
        async for event in stream:
            if cut is not None:
                await cut()
            elif isinstance(event, events.Delta):
                now = time.perf_counter()
                crowd.gaps += [(now - last) / event.n] * event.n if last else []
                last = now
        result = await stream.result()
    expected = bytes(oracle(list(prompt.encode()), tokens)).decode()
    end = f"{result.finish_reason} {result.cause} after {time.perf_counter() - begun:.1f} s"
    assert result.text == expected, f"{prompt!r} got {result.text!r}, not {expected!r}: {end}"
    if cut is None:
        crowd.streams, crowd.tokens = crowd.streams + 1, crowd.tokens + tokens


async def aborting(crowd: Crowd, chance: random.Random) -> None:
    async with (
        AsyncClient(crowd.url, timeouts=PATIENCE) as client,
        client.stream(prompt_of(chance), max_tokens=100) as stream,
    ):
        left = chance.randint(0, 40)
        async for _ in stream:
            left -= 1
            if left < 0:
                break
        if chance.random() < 0.5:
            await stream.cancel()


async def resetting(crowd: Crowd, chance: random.Random) -> None:
    async with Raw(crowd) as raw:
        await raw.generate(chance, on_disconnect=chance.choice(["linger", "cancel"]))
        await raw.hear_deltas(chance.randint(0, 40))
        await raw.reset()


async def closing(crowd: Crowd, chance: random.Random) -> None:
    """Leaves by 1000, which cancels."""
    async with Raw(crowd) as raw:
        await raw.generate(chance)
        await raw.hear_deltas(chance.randint(0, 40))


async def slow(crowd: Crowd, chance: random.Random) -> None:
    """A byte a second, and a small buffer."""
    async with Raw(crowd) as raw:
        sock = raw.socket.extra(SocketAttribute.raw_socket)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        for number in range(4):
            fields = {"prompt": prompt_of(chance), "max_tokens": 100, "logprobs": True, "top_logprobs": 5}
            await raw.say("generate", id=f"r{number}", **fields)
        for _ in range(chance.randint(2, 10)):
            await raw.socket.receive(1)
            await anyio.sleep(1)
        await raw.reset()


async def silent(crowd: Crowd, chance: random.Random) -> None:
    """Has a window and never acknowledges."""
    async with Raw(crowd) as raw:
        await raw.generate(chance, window=chance.randint(1, 8))
        while (await raw.hear())["type"] not in ("done", "error"):
            pass


async def flooding(crowd: Crowd, chance: random.Random) -> None:
    async with Raw(crowd) as raw:
        for _ in range(400):
            await raw.say(chance.choice(["ping", "cancel"]), **({"id": "x"} if chance.random() < 0.5 else {}))
        with anyio.move_on_after(2):
            while True:
                await raw.hear()


async def breaking(crowd: Crowd, chance: random.Random) -> None:
    """Says what makes no sense, in words or in bytes, beside a stream."""
    async with Raw(crowd) as raw:
        await raw.generate(chance)
        for _ in range(chance.randint(0, 5)):
            await raw.send(chance.choice(SENSELESS))
        await raw.socket.send(chance.choice(BROKEN))
        while True:
            await raw.hear()


async def vanishing(crowd: Crowd, chance: random.Random) -> None:
    """Reads some events over HTTP and is gone."""
    stream = await dial(crowd.url)
    body = json.dumps({"prompt": prompt_of(chance), "max_tokens": 100}).encode()
    head = (
        f"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n"
    )
    await stream.send(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    for number in range(chance.randint(1, 20)):
        data = await stream.receive()
        assert number or data.startswith(b"HTTP/1.1 200"), data
    await (reset(stream) if chance.random() < 0.5 else stream.aclose())


ROLES = (
    (30, behaved), (25, reconnecting), (25, aborting), (25, resetting), (15, closing), (20, slow), (20, silent),
    (15, flooding), (15, breaking), (10, vanishing),
)  # fmt: skip
POLITE = (behaved, reconnecting, aborting)


async def visit(url: str, seconds: float, seed: int) -> dict[str, Any]:
    """Let them all in; what they met."""
    clients, number = Crowd(url, seed), itertools.count()
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for count, role in ROLES:
                for _ in range(count):
                    tasks.start_soon(clients.live, next(number), role, role in POLITE)
    return clients.report()
