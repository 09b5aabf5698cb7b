"""Whatever is generated, however it is cut up, whenever the connection breaks: the same text, once, and one end."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine_sdk import AsyncClient, Backoff, events, wire
from streamengine_sdk.testing import FakeServer, FaultyTransport

AT_ONCE = Backoff(first=1e-9, longest=1e-9)
TOKENS = st.lists(
    st.one_of(st.just(""), st.text(max_size=4), st.sampled_from(["é", "京", "👩‍👩‍👧", "\u0000", '"\\'])), max_size=60
)
FIRST = st.integers(800, 4000)
"""Bytes of the first connection: a client that never had one is told so instead, see `ConnectError`."""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    answers=st.lists(TOKENS, min_size=1, max_size=3),
    first=FIRST,
    drops=st.lists(st.integers(1, 3000), max_size=12),
    split=st.none() | st.integers(1, 200),
    window=st.integers(0, 9),
    coalesce=st.integers(1, 7),
    iterate=st.booleans(),
)
def test_killed_at_any_byte_every_stream_comes_whole_and_once(
    backend: str,
    answers: Sequence[Sequence[str]],
    first: int,
    drops: list[int],
    split: int | None,
    window: int,
    coalesce: int,
    iterate: bool,
) -> None:
    server = CoalescingServer(answers, coalesce)
    transport = FaultyTransport(drop_every=[first, *drops], split=split, dial=server.dial)

    async def read(client: AsyncClient, index: int) -> None:
        stream = client.stream(str(index))
        seen: list[Any] = [event async for event in stream] if iterate else []
        result = await stream.result()
        assert (result.text, result.seq) == ("".join(answers[index]), len(answers[index]))
        if iterate:
            deltas = [event for event in seen if isinstance(event, events.Delta)]
            assert "".join(event.text for event in deltas) == result.text == stream.snapshot
            ends = [0, *(event.seq for event in deltas)]
            assert [event.seq - event.n for event in deltas] == ends[:-1]
            assert [event for event in seen if isinstance(event, events.Done)] == seen[-1:]

    async def main() -> None:
        with anyio.fail_after(20):
            async with (
                AsyncClient("http://fake", transport=transport, reconnect=AT_ONCE, window=window) as client,
                anyio.create_task_group() as tasks,
            ):
                for index in range(len(answers)):
                    tasks.start_soon(read, client, index)

    anyio.run(main, backend=backend)
    # No answer was generated twice, and none was cancelled.
    assert sorted(request.prompt or "" for request in server.requests) == [str(i) for i in range(len(answers))]
    assert server.cancelled == []


class CoalescingServer(FakeServer):
    """Puts ``coalesce`` tokens into a delta, whatever the client said."""

    def __init__(self, answers: Sequence[Sequence[str]], coalesce: int) -> None:
        super().__init__(lambda request: answers[int(request.prompt or 0)])
        self._coalesce = coalesce

    def delivery(self, wanted: wire.Delivery) -> wire.Delivery:
        return wire.Delivery(coalesce_tokens=self._coalesce, window=wanted.window)
