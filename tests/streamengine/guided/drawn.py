"""A model whose letters are drawn at random, with a liking for those that close something; and what runs on it."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import anyio

from compiled.step import Sampling
from streamengine.engine import Engine
from streamengine.session import Session, TransportClosed
from streamengine_sdk import AsyncClient
from streamengine_sdk.testing import MemoryPeer, MemoryTransport
from tests.fakes import FakeRunner, byte_tokenizer_json, fake_kv, fake_model
from tests.serving import engine_over
from tests.sessions import hub

CLOSERS = b'"]},'
OTHERS = b"123456789abc -{["


def drawn(context: Sequence[int], sampling: Sampling) -> int:
    number = crc32(",".join(map(str, context)).encode(), sampling.seed & 0xFFFFFFFF)
    letters = CLOSERS if number % 3 == 0 else OTHERS
    return letters[number // 256 % len(letters)]


def runner_in(folder: Path, most: int = 2048) -> FakeRunner:
    """It has the vocabulary of bytes as ``tokenizer.json``, which a grammar needs."""
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return FakeRunner(kv=fake_kv(pages=2049, page_size=16), model=fake_model(most, str(folder)), answer=drawn)


@asynccontextmanager
async def client_of(folder: Path, **options: Any) -> AsyncIterator[tuple[AsyncClient, list[MemoryPeer], Engine]]:
    """An SDK's client whose connections end in sessions over a real engine."""
    peers: list[MemoryPeer] = []
    with anyio.fail_after(30):
        async with (
            engine_over(runner_in(folder))(lambda progress: None) as engine,
            hub(engine) as it,
            anyio.create_task_group() as tasks,
        ):

            def serve(peer: MemoryPeer) -> None:
                peers.append(peer)
                tasks.start_soon(Session(it.streams, peer, it.config).run)

            def dial(endpoint: object) -> MemoryTransport:
                return MemoryTransport(serve, closed=TransportClosed)

            async with AsyncClient("http://memory", transport=dial, **options) as client:
                yield client, peers, engine
            tasks.cancel_scope.cancel()


def values_of(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """As they become complete."""
    children: Any = enumerate(document) if isinstance(document, list) else []
    for key, child in document.items() if isinstance(document, dict) else children:
        yield from values_of(child, f"{path}/{key}")
    yield path, document
