"""What streams may cost: caps on a stream and on a principal, what is forgotten first, who is told to wait how long."""

from typing import Any

import anyio
import pytest

from streamengine.config import ServerConfig
from streamengine.engine import Generate
from streamengine.errors import (
    InvalidRequest,
    Overloaded,
    RateLimited,
    ResumeGap,
    ShuttingDown,
    StreamNotFound,
    TooManyStreams,
)
from streamengine.log import Log, TokenLogprob
from streamengine.streams import ANONYMOUS, Attachment, Principal, StreamRecord, Streams
from tests.sessions import ScriptedEngine, end, hub, say

pytestmark = pytest.mark.anyio

ALICE = Principal(name="alice", tenant="a")
ASKED = Generate(prompt="hello")


class Wake:
    def set(self) -> None: ...


def streams_of(**config: Any) -> Streams:
    engine: Any = ScriptedEngine()
    return Streams(engine, ServerConfig(**config))


async def opened(streams: Streams, principal: Principal = ALICE) -> tuple[StreamRecord, Attachment]:
    record, _ = await streams.open(principal, ASKED)
    return record, streams.attach(record, Wake())


def think(log: Log, tokens: int) -> None:
    """Tokens with twenty log-probabilities each: about 5 KB a token."""
    top = tuple(TokenLogprob(token=n, text="x", bytes=b"x", logprob=-1.0, rank=n + 1) for n in range(20))
    item = TokenLogprob(token=0, text="x", bytes=b"x", logprob=-1.0, rank=1, top=top)
    log.append([(0, "x")] * tokens, [item] * tokens)
    log.wake()


async def test_above_the_cap_of_a_stream_log_probabilities_go_that_every_reader_has() -> None:
    streams = streams_of(max_log_bytes=100_000)
    record, first = await opened(streams)
    second = streams.attach(record, Wake())
    think(record.log, 15)
    first.acked, second.acked = 15, 10
    think(record.log, 10)
    assert record.log.logprobs_after == 10
    assert record.log.size <= 100_000
    assert not (first.lapsed or second.lapsed)
    streams.detach(first)
    with pytest.raises(ResumeGap) as gap:
        streams.attach(record, Wake(), after=9)
    assert gap.value.details["available_from"] == 10
    delta = streams.attach(record, Wake(), after=10).reader.take()
    assert delta is not None
    assert len(delta.logprobs) == delta.n == 15
    assert record.log.text == "x" * 25


async def test_a_reader_that_holds_too_much_back_is_let_go_and_the_stream_stays_bounded() -> None:
    streams = streams_of(max_log_bytes=100_000)
    record, slow = await opened(streams)
    quick = streams.attach(record, Wake())
    for _ in range(100):
        think(record.log, 1)
        quick.acked = len(record.log)
    assert (slow.lapsed, quick.lapsed) == (True, False)
    assert record.log.size < 110_000


async def test_text_is_kept_whole_above_the_cap_and_nobody_is_let_go_for_it() -> None:
    streams = streams_of(max_log_bytes=1000)
    record, attachment = await opened(streams)
    say(record.log, "x" * 1000)
    assert not attachment.lapsed
    streams.attach(record, Wake())


async def test_a_session_tells_a_reader_that_was_let_go() -> None:
    async with hub(max_log_bytes=100_000) as it:
        connected = it.connect()
        log = await connected.started(logprobs=True, top_logprobs=20, delivery={"window": 1})
        think(log, 1)
        await connected.client.next()
        for _ in range(40):
            think(log, 1)
        error = await connected.client.next()
        assert (error["code"], error["seq"]) == ("slow_consumer", 1)
        answer = await connected.attached(log.id, after=1)
        assert (answer["code"], answer["status"], answer["available_from"]) == (
            "resume_gap", 410, log.logprobs_after
        )  # fmt: skip


async def test_above_the_cap_of_a_principal_the_oldest_ended_stream_goes_and_then_nothing_is_taken() -> None:
    streams = streams_of(max_principal_log_bytes=100_000)
    records = []
    for _ in range(3):
        record, _ = await opened(streams)
        say(record.log, "x" * 300)
        records.append(record)
    for record in records[:2]:
        end(record.log)
        streams.detach(record.attachments[0])
    other, _ = await opened(streams, ANONYMOUS)
    say(records[2].log, "x" * 350)
    with pytest.raises(StreamNotFound):
        streams.find(records[0].log.id, ALICE)
    assert streams.find(records[1].log.id, ALICE) is records[1]
    say(records[2].log, "x" * 600)
    with pytest.raises(StreamNotFound):
        streams.find(records[1].log.id, ALICE)
    with pytest.raises(RateLimited, match="at most 100000"):
        await streams.open(ALICE, ASKED)
    assert streams.find(other.log.id, ANONYMOUS) is other
    await streams.open(ANONYMOUS, ASKED)


async def test_what_ended_is_kept_while_somebody_reads_it() -> None:
    streams = streams_of(retain_s=1)
    record, attachment = await opened(streams)
    end(record.log)
    streams.expire(anyio.current_time() + 100)
    assert streams.find(record.log.id, ALICE) is record
    streams.detach(attachment)
    streams.detach(attachment)
    streams.expire(anyio.current_time() + 100)
    with pytest.raises(StreamNotFound):
        streams.find(record.log.id, ALICE)
    assert streams.statistics() == {"streams_kept": 0, "streams_attached": 0, "stream_log_bytes": 0}


async def test_a_reader_that_lagged_past_the_retention_has_time_to_come_back() -> None:
    streams = streams_of(retain_s=1, linger_s=10)
    record, attachment = await opened(streams)
    end(record.log)
    assert record.ended_at is not None
    record.ended_at -= 5
    streams.detach(attachment)
    streams.expire(anyio.current_time() + 9)
    assert streams.find(record.log.id, ALICE) is record
    streams.expire(anyio.current_time() + 11)
    with pytest.raises(StreamNotFound):
        streams.find(record.log.id, ALICE)


async def test_a_principal_has_so_many_running_streams_and_anybody_as_many_as_the_engine() -> None:
    streams = streams_of(max_principal_streams=1)
    record, _ = await opened(streams)
    with pytest.raises(TooManyStreams):
        await streams.open(ALICE, ASKED)
    end(record.log)
    await streams.open(ALICE, ASKED)
    for _ in range(2):
        await streams.open(ANONYMOUS, ASKED)


async def test_a_stream_that_nobody_attached_to_is_cancelled_as_well() -> None:
    streams = streams_of()
    record, _ = await streams.open(ALICE, ASKED)
    streams.expire(anyio.current_time() + 16)
    engine: Any = streams.engine
    assert engine.aborts == [(record.log, "disconnect")]


async def test_a_key_is_free_again_when_its_stream_is_forgotten() -> None:
    streams = streams_of()
    record, replay = await streams.open(ALICE, ASKED, "key-0001")
    assert (await streams.open(ALICE, ASKED, "key-0001")) == (record, True)
    assert not replay
    with pytest.raises(InvalidRequest, match="key was used for another request"):
        await streams.open(ALICE, Generate(prompt="other"), "key-0001")
    end(record.log)
    streams.expire(anyio.current_time() + 61)
    fresh, replay = await streams.open(ALICE, Generate(prompt="other"), "key-0001")
    assert (fresh is record, replay) == (False, False)


async def test_who_is_turned_away_is_told_to_wait_for_as_many_ends_as_there_are_before() -> None:
    streams = streams_of()
    full = Overloaded("full")
    assert streams.retry_after_ms(full) == 1000
    records = [(await opened(streams))[0] for _ in range(3)]
    for record, at in zip(records, (10.0, 14.0, 18.0), strict=True):
        end(record.log)
        record.ended_at = at
    streams._ends.clear()
    streams._ends.extend([10.0, 14.0, 18.0])
    assert [streams.retry_after_ms(full) for _ in range(3)] == [4000, 8000, 12000]
    another, _ = await opened(streams)
    end(another.log)
    streams._ends.pop()
    assert streams.retry_after_ms(full) == 4000
    assert [streams.retry_after_ms(full) for _ in range(100)][-1] == 60_000
    assert streams.retry_after_ms(ShuttingDown("bye")) == 1000
    assert streams.retry_after_ms(RateLimited("slow", retry_after_ms=7)) == 7
    assert streams.retry_after_ms(InvalidRequest("no", param="x")) is None
