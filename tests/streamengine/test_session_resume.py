"""A stream is a log and a socket is a view of it: attach, windows, keys, batches, and what a lost connection leaves."""

import json
from typing import Any

import anyio
import pytest

from streamengine.errors import RateLimited, Unauthorized
from streamengine.log import TokenLogprob
from streamengine.session.view import PIECE_TOKENS
from streamengine.streams import Principal
from tests.sessions import PATIENCE_S, Connected, Hub, Message, connect, end, hub, say

pytestmark = pytest.mark.anyio


def text_of(messages: list[Message], after: int = 0) -> str:
    """Joined, and without a gap from ``after`` on."""
    deltas = [message for message in messages if message["type"] == "delta"]
    for delta in deltas:
        assert delta["seq"] - delta.get("n", 1) == after, f"{delta} after {after}"
        after = delta["seq"]
    return "".join(delta["text"] for delta in deltas)


# attach


async def test_a_lost_stream_goes_on_where_the_client_had_got_to() -> None:
    async with hub() as it:
        first = it.connect()
        log = await first.started()
        say(log, "Héllo")
        assert (await first.client.next())["seq"] == 5
        await first.left()
        say(log, " wörld")
        second = it.connect()
        accepted = await second.attached(log.id, after=2, id="other")
        assert (accepted["type"], accepted["stream"], accepted["after"], "replay" in accepted) == (
            "accepted", log.id, 2, False
        )  # fmt: skip
        say(log, "!")
        end(log)
        messages = await second.client.until("done", "other")
        assert text_of(messages, after=2) == "llo wörld!"
        done = messages[-1]
        assert (done["check"]["bytes"], done["stream"], done["seq"]) == (len("Héllo wörld!".encode()), log.id, 13)
        assert done["delivery"]["attaches"] == 2
        assert it.engine.aborts == []


async def test_token_ids_and_log_probabilities_are_shown_again() -> None:
    async with hub() as it:
        first = it.connect()
        log = await first.started(logprobs=True)
        items = [TokenLogprob(token=n, text="x", bytes=b"x", logprob=-1.0 * n, rank=1) for n in range(4)]
        log.append([(n, "x") for n in range(4)], items)
        log.wake()
        await first.client.next()
        await first.left()
        second = it.connect()
        await second.attached(log.id, after=1, delivery={"token_ids": True})
        delta = await second.client.next()
        assert (delta["tokens"], [item["logprob"] for item in delta["logprobs"]]) == ([1, 2, 3], [-1.0, -2.0, -3.0])


async def test_a_stream_that_has_ended_can_be_attached_to_until_it_is_forgotten() -> None:
    async with hub(retain_s=60) as it:
        first = it.connect()
        log = await first.started()
        say(log, "all of it")
        end(log)
        await first.client.until("done", "r1")
        second = it.connect()
        await second.attached(log.id)
        assert text_of(await second.client.until("done", "r1")) == "all of it"
        await second.attached(log.id, after=9)
        assert [message["type"] for message in await second.client.until("done", "r1")] == ["done"]
        it.streams.expire(anyio.current_time() + 61)
        error = await second.attached(log.id)
        assert (error["code"], error["status"], error["id"]) == ("stream_not_found", 404, "r1")


async def test_a_stream_has_several_readers_each_with_a_pace_of_its_own_but_not_any_number() -> None:
    async with hub() as it:
        readers = [it.connect() for _ in range(5)]
        log = await readers[0].started()
        for reader in readers[1:4]:
            await reader.attached(log.id)
        error = await readers[4].attached(log.id)
        assert (error["code"], error["retryable"]) == ("too_many_streams", True)
        readers[1].client.block()
        say(log, "abc")
        end(log)
        for reader in (readers[0], readers[2], readers[3]):
            assert text_of(await reader.client.until("done", "r1")) == "abc"
        readers[1].client.unblock()
        assert text_of(await readers[1].client.until("done", "r1")) == "abc"


@pytest.mark.parametrize(("after", "stream"), [(4, None), (0, "st_0123456789abcdef")])
async def test_what_cannot_be_attached_to_is_refused_and_harms_nothing(after: int, stream: str | None) -> None:
    async with hub() as it:
        one, other = it.connect(), it.connect()
        log = await one.started()
        say(log, "abc")
        error = await other.attached(stream or log.id, after=after)
        assert (error["code"], error["param"]) == (
            ("invalid_request", "after") if stream is None else ("stream_not_found", "stream")
        )
        end(log)
        assert text_of(await one.client.until("done", "r1")) == "abc"


async def test_a_stream_is_there_for_its_own_principal_only() -> None:
    async with hub() as it:
        alice, bob = Principal(name="alice", tenant="t"), Principal(name="bob", tenant="t")
        mine = it.connect(principal=alice)
        log = await mine.started(key="12345678")
        assert it.engine.generates[0].tenant == "t"
        theirs = it.connect(principal=bob)
        error = await theirs.attached(log.id)
        assert error["code"] == "stream_not_found"
        assert await theirs.started(key="12345678") is not log
        assert (await it.connect(principal=alice).attached(log.id))["type"] == "accepted"


# flow control


async def test_a_window_without_an_ack_delivers_exactly_so_many_and_one_ack_as_many_again() -> None:
    async with connect() as it:
        log = await it.started(delivery={"window": 64})
        for _ in range(50):
            say(log, "abcd")
            await anyio.wait_all_tasks_blocked()
        shown = [await it.client.next() for _ in range(it.client.unread())]
        assert len(text_of(shown)) == 64
        it.client.send("ack", id="r1", seq=64)
        delta = await it.client.next()
        assert (delta["seq"], delta["n"]) == (128, 64)
        end(log)
        await anyio.wait_all_tasks_blocked()
        assert it.client.unread() == 0
        it.client.send("ack", id="r1", seq=128)
        it.client.send("ack", id="r1", seq=100)
        assert (await it.client.next())["seq"] == 192
        it.client.send("ack", id="r1", seq=192)
        done = (await it.client.until("done", "r1"))[-1]
        assert (done["seq"], done["delivery"]["max_lag"] > 64) == (201, True)


async def test_what_fills_a_window_is_sent_even_if_it_has_no_text_and_less_than_was_to_gather() -> None:
    async with connect() as it:
        log = await it.started(delivery={"window": 3, "coalesce_tokens": 100})
        log.append([(1, ""), (2, "")])
        log.wake()
        await anyio.wait_all_tasks_blocked()
        log.append([(3, ""), (4, "é")])
        log.wake()
        delta = await it.client.next()
        assert (delta["seq"], delta["n"], delta["text"]) == (3, 3, "")
        it.client.send("ack", id="r1", seq=3)
        end(log)
        assert (await it.client.next())["text"] == "é"


async def test_a_reader_that_never_acknowledges_is_let_go_and_can_come_back() -> None:
    async with hub(ack_stall_s=0.1) as it:
        slow, other = it.connect(), it.connect()
        log = await slow.started(delivery={"window": 2})
        say(log, "abcdef")
        await slow.client.next()
        error = await slow.client.next()
        assert (error["code"], error["stream"], error["seq"], error["retryable"]) == ("slow_consumer", log.id, 2, True)
        end(log)
        await other.attached(log.id, after=2)
        assert text_of(await other.client.until("done", "r1"), after=2) == "cdef"
        assert it.engine.aborts == []
        await slow.started("r1")


async def test_an_ack_of_what_was_not_sent_is_none() -> None:
    async with connect() as it:
        log = await it.started(delivery={"window": 2})
        say(log, "abcdef")
        await it.client.next()
        it.client.send("ack", id="r1", seq=5)
        it.client.send("ack", id="nobody", seq=5)
        await anyio.wait_all_tasks_blocked()
        assert it.client.unread() == 0


async def test_a_turn_is_bounded_in_characters_too() -> None:
    async with connect() as it:
        log = await it.started()
        it.client.block()
        log.append([(1, "x" * 1000)] * 100)
        end(log)
        it.client.unblock()
        deltas = (await it.client.until("done", "r1"))[:-1]
        assert len(text_of(deltas)) == 100_000
        assert max(len(delta["text"]) for delta in deltas) < 10_000


# batches and padding


async def test_a_client_that_takes_batches_gets_small_messages_of_several_streams_in_one_frame() -> None:
    async with connect() as it:
        it.client.send("init", batch=True, client="test")
        logs = [await it.started(f"r{number}") for number in range(10)]
        await anyio.wait_all_tasks_blocked()
        before = len(it.client.frames)
        it.client.block()
        for log in logs:
            say(log, "token")
        await anyio.wait_all_tasks_blocked()
        it.client.unblock()
        assert {(await it.client.next())["id"] for _ in logs} == {f"r{number}" for number in range(10)}
        assert len(it.client.frames) - before == 1
        for log in logs:
            say(log, "x" * PIECE_TOKENS * 10)
            end(log)
        texts = dict.fromkeys((f"r{number}" for number in range(10)), 0)
        ended = 0
        while ended < 10:
            message = await it.client.next()
            ended += message["type"] == "done"
            texts[message["id"]] += len(message.get("text", ""))
        assert set(texts.values()) == {PIECE_TOKENS * 10}
        assert max(map(len, it.client.frames)) <= 17 * 1024


@pytest.mark.parametrize(("default", "delivery", "multiple"), [(0, {"pad": 32}, 32), (16, {}, 16)])
async def test_padded_deltas_have_few_lengths(default: int, delivery: Any, multiple: int) -> None:
    async with hub() as them:
        it = them.connect(pad=default)
        log = await it.started(delivery=delivery)
        sent = len(it.client.frames)
        for text in ("a", "é🌍", "a longer one", '"\n'):
            say(log, text)
            await anyio.wait_all_tasks_blocked()
        frames = it.client.frames[sent:]
        assert all(json.loads(frame)["type"] == "delta" for frame in frames)
        assert {len(frame.encode()) % multiple for frame in frames} == {0}
        pads = [json.loads(frame)["pad"] for frame in frames]
        assert len(set(pads)) == len(pads)


async def test_a_client_can_say_that_it_wants_no_padding() -> None:
    async with hub() as them:
        it = them.connect(pad=32)
        log = await it.started(delivery={"pad": 0})
        say(log, "a")
        assert "pad" not in await it.client.next()


# keys


async def test_a_repeated_key_shows_the_stream_that_is_there_and_generates_nothing() -> None:
    async with hub() as it:
        lost = it.connect()
        log = await lost.started(key="abcdefgh", max_tokens=5)
        await lost.left()
        say(log, "once")
        again = it.connect()
        again.client.generate("r9", key="abcdefgh", max_tokens=5)
        accepted = await again.client.next("hello")
        assert (accepted["type"], accepted["stream"], accepted["replay"]) == ("accepted", log.id, True)
        end(log)
        assert text_of(await again.client.until("done", "r9")) == "once"
        assert len(it.engine.logs) == 1
        again.client.generate("r9", key="abcdefgh", max_tokens=6)
        error = await again.client.next()
        assert (error["code"], error["param"]) == ("invalid_request", "key")


async def test_two_requests_with_one_key_at_once_make_one_stream() -> None:
    async with hub() as it:
        it.engine.may_submit = anyio.Event()
        one, other = it.connect(), it.connect()
        for client in (one.client, other.client):
            client.generate("r1", key="abcdefgh")
        await anyio.wait_all_tasks_blocked()
        it.engine.may_submit.set()
        answers = [await connected.client.next("hello") for connected in (one, other)]
        assert len({answer["stream"] for answer in answers}) == 1
        assert sorted(answer.get("replay", False) for answer in answers) == [False, True]


async def test_a_key_whose_request_was_never_taken_is_free() -> None:
    async with hub() as it:
        it.engine.may_submit = anyio.Event()
        lost, other = it.connect(), it.connect()
        lost.client.generate("r1", key="abcdefgh")
        other.client.generate("r1", key="abcdefgh")
        await anyio.wait_all_tasks_blocked()
        await lost.left()
        it.engine.may_submit.set()
        answer = await other.client.next("hello")
        assert (answer["type"], "replay" in answer) == ("accepted", False)


# what a lost connection leaves


async def lost(it: Hub, code: int, **delivery: Any) -> Connected:
    connected = it.connect()
    await connected.started(delivery=delivery)
    await connected.left(code)
    return connected


@pytest.mark.parametrize("code", [1001, 1005, 1006, 1011, 4000])
async def test_a_stream_that_lost_its_reader_lingers_and_is_then_cancelled(code: int) -> None:
    async with hub(linger_s=15) as it:
        await lost(it, code)
        it.streams.expire(anyio.current_time() + 14)
        assert it.engine.aborts == []
        it.streams.expire(anyio.current_time() + 16)
        assert it.engine.aborts == [(it.engine.logs[0], "disconnect")]


async def test_how_long_it_lingers_is_for_the_client_to_say() -> None:
    async with hub() as it:
        await lost(it, 1006, linger_s=600)
        it.streams.expire(anyio.current_time() + 590)
        assert it.engine.aborts == []
        await lost(it, 1006, on_disconnect="cancel")
        await lost(it, 1006, linger_s=0)
        await lost(it, 1000, linger_s=600)
        assert [log for log, _ in it.engine.aborts] == it.engine.logs[1:]


async def test_nobody_cancels_what_somebody_else_still_reads() -> None:
    async with hub() as it:
        one, other = it.connect(), it.connect()
        log = await one.started()
        await other.attached(log.id)
        await one.left(1000)
        assert it.engine.aborts == []
        await other.left(1000)
        assert it.engine.aborts == [(log, "disconnect")]


async def test_an_attach_ends_the_lingering() -> None:
    async with hub() as it:
        connected = await lost(it, 1006)
        log = connected.engine.logs[0]
        await it.connect().attached(log.id)
        it.streams.expire(anyio.current_time() + 100)
        assert it.engine.aborts == []


async def test_lingering_ends_by_itself() -> None:
    async with hub(linger_s=0.05) as it:
        await lost(it, 1006)
        with anyio.fail_after(PATIENCE_S):
            await it.engine.aborted.wait()


# who may talk, and how much


def admit(token: str) -> Principal:
    if token == "crowd":
        raise RateLimited("32 connections of this key are open")
    if token != "secret":
        raise Unauthorized("the key is not known")
    return Principal(name="alice")


async def test_where_a_key_is_needed_it_comes_first_and_what_follows_need_not_wait() -> None:
    async with hub() as them:
        it = them.connect(principal=None, admit=admit)
        it.client.send("init", token="secret")
        it.client.generate("r1")
        assert (await it.client.next())["auth"] == "required"
        assert (await it.client.next())["type"] == "accepted"


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ({"type": "init", "token": "wrong"}, 4401),
        ({"type": "init"}, 4401),
        ({"type": "init", "token": "crowd"}, 4429),
        ({"type": "ping"}, 4401),
        ({"type": "generate", "id": "r1", "prompt": "x"}, 4401),
        ({"type": "nonsense"}, 4401),
    ],
)
async def test_without_a_good_key_the_connection_ends_with_its_reason(first: Message, code: int) -> None:
    async with hub() as them:
        it = them.connect(principal=None, admit=admit)
        it.client.send_raw(json.dumps(first))
        await it.client.next()
        error = await it.client.next()
        assert error["fatal"] and "id" not in error and "ref" not in error
        assert error["code"] == ("rate_limited" if code == 4429 else "unauthorized")
        assert await it.closed() == code
        assert them.engine.logs == []


async def test_a_key_that_does_not_come_in_time_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamengine.session.connection.INIT_S", 0.05)
    async with hub() as them:
        it = them.connect(principal=None, admit=admit)
        assert (await it.client.next("hello"))["code"] == "unauthorized"
        assert await it.closed() == 4408


async def test_init_is_for_the_first_message() -> None:
    async with connect() as it:
        await it.client.next()
        it.client.send("init", client="me")
        it.client.send("init", batch=True)
        error = await it.client.next()
        assert (error["code"], "id" in error) == ("invalid_message", False)


async def test_too_many_messages_are_refused_with_when_to_come_back_and_a_flood_ends_the_connection() -> None:
    async with connect(message_rate=1, message_burst=5) as it:
        await it.client.next()
        for _ in range(5):
            it.client.send("ping", t=1)
        it.client.generate("r1")
        answers = [await it.client.next() for _ in range(6)]
        assert [answer["type"] for answer in answers] == ["pong"] * 5 + ["error"]
        error = answers[-1]
        assert (error["code"], error["id"], error["retryable"]) == ("rate_limited", "r1", True)
        assert 0 < error["retry_after_ms"] <= 1000
        for _ in range(10):
            it.client.send("ping", t=2)
        while not (error := await it.client.next()).get("fatal"):
            assert error["code"] == "rate_limited"
        assert await it.closed() == 4429


async def test_acks_and_cancels_are_paid_for_by_what_they_are_about() -> None:
    async with connect(message_rate=0.001, message_burst=2) as it:
        logs = [await it.started("a", delivery={"window": 1}), await it.started("b")]
        say(logs[0], "x" * 50)
        for seq in range(1, 51):
            assert (await it.client.next())["seq"] == seq
            it.client.send("ack", id="a", seq=seq)
        it.client.send("cancel", id="b")
        await anyio.wait_all_tasks_blocked()
        assert it.engine.aborts == [(logs[1], "client")]
        it.client.send("cancel", id="b")
        assert (await it.client.next())["code"] == "rate_limited"


async def test_a_connection_without_requests_is_sent_away_after_a_while() -> None:
    async with connect(idle_s=0.05) as it:
        await it.client.next()
        goaway = await it.client.next()
        assert (goaway["reason"], goaway["reconnect"]) == ("idle", True)
        assert await it.closed() == 1001


async def test_a_long_session_is_sent_away_and_its_streams_wait_for_the_next_one() -> None:
    async with hub(max_session_s=0.05, drain_s=0.05) as them:
        it = them.connect()
        log = await it.started()
        say(log, "abc")
        kinds = {(await it.client.next())["type"] for _ in range(2)}
        assert kinds == {"delta", "goaway"}
        assert await it.closed() == 1001
        next_one = them.connect()
        await next_one.attached(log.id, after=3)
        end(log)
        await next_one.client.until("done", "r1")
        assert them.engine.aborts == []
