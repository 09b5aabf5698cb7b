"""One connection against an engine whose every token is placed by the test, on both event loops."""

import json
from typing import Any
from zlib import crc32

import anyio
import pytest

from streamengine.errors import ContextLengthExceeded, EngineFailure, Overloaded
from streamengine.log import TokenLogprob
from tests.sessions import PATIENCE_S, Message, connect, end, say

pytestmark = pytest.mark.anyio


async def test_the_first_message_says_what_the_server_is_and_allows() -> None:
    async with connect(max_streams=3) as it:
        hello = await it.client.next()
        assert (hello["type"], hello["protocol"], hello["epoch"], hello["models"]) == (
            "hello", "streamengine.v1", it.hub.streams.epoch, ["fake"]
        )  # fmt: skip
        limits = {"max_message_bytes": 4 * 1024 * 1024, "max_streams": 3, "heartbeat_s": 15.0, "retain_s": 60.0}
        assert limits.items() <= hello["limits"].items()
        assert {"attach", "ack", "batch", "key"} <= set(hello["features"])
        assert hello["server"].keys() == {"name", "version"}


async def test_a_stream_has_no_gap_no_repeat_one_terminal_and_a_checksum() -> None:
    async with connect() as it:
        log = await it.started(max_tokens=50, temperature=0.5, stop=["x"], timeouts={"queue_s": 2})
        for piece in ("Hé", "llo ", "wörld 🌍"):
            say(log, piece)
            await anyio.wait_all_tasks_blocked()
        end(log)
        *deltas, done = await it.client.until("done", "r1")
        last = 0
        for delta in deltas:
            assert delta["seq"] - delta.get("n", 1) == last
            last = delta["seq"]
        text = "".join(delta["text"] for delta in deltas)
        assert text == "Héllo wörld 🌍"
        assert done["seq"] == last + 1 == len(text) + 1
        assert done["check"] == {"bytes": len(text.encode()), "crc32": crc32(text.encode())}
        assert done["usage"]["total_tokens"] == 7 + len(text)
        (generate,) = it.engine.generates
        assert (generate.prompt, generate.queue_s, generate.total_s) == ("hello", 2, None)
        assert (generate.sampling.max_tokens, generate.sampling.temperature) == (50, 0.5)
        assert generate.sampling.stop == ("x",)


async def test_requests_of_one_socket_run_side_by_side() -> None:
    async with connect() as it:
        first, second = await it.started("a"), await it.started("b")
        say(second, "two")
        say(first, "one")
        end(first)
        end(second)
        texts = {"a": "", "b": ""}
        finished = 0
        while finished < 2:
            message = await it.client.next()
            finished += message["type"] == "done"
            texts[message["id"]] += message.get("text", "")
        assert texts == {"a": "one", "b": "two"}


async def test_an_id_may_be_used_again_after_its_terminal() -> None:
    async with connect() as it:
        for text in ("first", "second"):
            log = await it.started("r1")
            say(log, text)
            end(log)
            messages = await it.client.until("done", "r1")
            assert messages[0]["text"] == text


async def test_tokens_that_come_while_the_socket_is_full_leave_as_one_delta() -> None:
    async with connect() as it:
        log = await it.started()
        it.client.block()
        for character in "abcdef":
            say(log, character)
            await anyio.wait_all_tasks_blocked()
        assert it.client.unread() == 0
        it.client.unblock()
        delta = await it.client.next()
        assert (delta["seq"], delta["n"], delta["text"]) == (6, 6, "abcdef")


async def test_a_full_socket_holds_up_neither_cancel_nor_the_engine() -> None:
    async with connect() as it:
        log = await it.started()
        it.client.block()
        say(log, "abc")
        it.client.send("cancel", id="r1")
        await anyio.wait_all_tasks_blocked()
        assert it.engine.aborts == [(log, "client")]


async def test_a_long_backlog_leaves_in_pieces_and_others_get_their_turn_between() -> None:
    async with connect() as it:
        long, short = await it.started("long"), await it.started("short")
        it.client.block()
        say(long, "x" * 2000)
        say(short, "y")
        await anyio.wait_all_tasks_blocked()
        it.client.unblock()
        order = [(await it.client.next())["id"] for _ in range(5)]
        assert order.index("short") < 3
        assert order.count("long") == 4


async def test_coalescing_by_tokens_waits_for_the_number_or_the_end() -> None:
    async with connect() as it:
        log = await it.started(delivery={"coalesce_tokens": 4})
        for character in "abcdefg":
            say(log, character)
            await anyio.wait_all_tasks_blocked()
        end(log)
        deltas = (await it.client.until("done", "r1"))[:-1]
        assert [delta["text"] for delta in deltas] == ["a", "bcde", "fg"]


async def test_coalescing_by_time_holds_back_until_it_has_passed() -> None:
    async with connect() as it:
        log = await it.started(delivery={"coalesce_ms": 50})
        say(log, "a")
        assert (await it.client.next())["text"] == "a"
        begun = anyio.current_time()
        say(log, "b")
        await anyio.wait_all_tasks_blocked()
        say(log, "c")
        assert (await it.client.next())["text"] == "bc"
        assert anyio.current_time() - begun > 0.03


async def test_a_token_without_text_rides_with_the_next_that_has_some() -> None:
    async with connect() as it:
        log = await it.started()
        say(log, "a")
        assert (await it.client.next())["text"] == "a"
        log.append([(1, "")])
        log.wake()
        await anyio.wait_all_tasks_blocked()
        assert it.client.unread() == 0
        log.append([(2, "é"), (3, "")])
        end(log)
        delta, done = await it.client.until("done", "r1")
        assert (delta["seq"], delta["n"], delta["text"], done["seq"]) == (4, 3, "é", 5)


async def test_token_ids_come_when_they_are_asked_for() -> None:
    async with connect() as it:
        log = await it.started(delivery={"token_ids": True})
        log.append([(300, "")])
        log.wake()
        delta = await it.client.next()
        assert (delta["seq"], delta["text"], delta["tokens"]) == (1, "", [300])


async def test_every_way_to_draw_reaches_the_engine_under_its_name() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 2, "typical_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 0.5,
        "ignore_eos": True, "include_stop_str_in_output": True,
    }  # fmt: skip
    lists: dict[str, Any] = {"stop_token_ids": [4], "allowed_token_ids": [4, 5]}
    async with connect() as it:
        words = ["no", [1, 2]]
        await it.started(
            **fields, **lists, bad_words=words, logit_bias={"5": 1}, logprobs=True, top_logprobs=3, priority=7
        )
        (generate,) = it.engine.generates
        sampling = generate.sampling
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert {name: list(getattr(sampling, name)) for name in lists} == lists
        assert sampling.bad_words == ("no", (1, 2))
        assert (sampling.bias_by_id, sampling.logprobs) == ({5: 1.0}, 3)
        assert (generate.priority, generate.tenant) == (7, "")


async def test_log_probabilities_come_one_for_each_token_and_parts_of_characters_as_bytes() -> None:
    async with connect() as it:
        log = await it.started(logprobs=True, top_logprobs=1)
        top = TokenLogprob(token=65, text="A", bytes=b"A", logprob=-0.1, rank=1)
        items = [
            TokenLogprob(token=token, text="\ufffd", bytes=bytes([token]), logprob=-1.0, rank=2, top=(top,))
            for token in "é".encode()
        ]
        log.append([(0xC3, ""), (0xA9, "é")], items)
        end(log)
        delta, _ = await it.client.until("done", "r1")
        shown = {"logprob": -1.0, "top": [{"token": 65, "text": "A", "logprob": -0.1}]}
        assert delta["logprobs"] == [{"token": 0xC3, "b64": "ww==", **shown}, {"token": 0xA9, "b64": "qQ==", **shown}]
        assert len(delta["logprobs"]) == delta["n"]


async def test_log_probabilities_leave_in_smaller_pieces() -> None:
    async with connect() as it:
        log = await it.started(logprobs=True)
        item = TokenLogprob(token=120, text="x", bytes=b"x", logprob=-1.0, rank=1)
        log.append([(120, "x")] * 100, [item] * 100)
        end(log)
        deltas = (await it.client.until("done", "r1"))[:-1]
        assert [len(delta["logprobs"]) for delta in deltas] == [delta["n"] for delta in deltas] == [32, 32, 32, 4]


async def test_tokens_from_the_prefix_cache_are_told_while_waiting_and_at_the_end() -> None:
    async with connect() as it:
        log = await it.started()
        log.started, log.cached_tokens = True, 4
        log.wake()
        assert (await it.client.next())["cached_tokens"] == 4
        say(log, "a")
        end(log)
        assert (await it.client.until("done", "r1"))[-1]["usage"]["cached_tokens"] == 4


async def test_a_duplicate_id_is_refused_and_the_running_request_goes_on() -> None:
    async with connect() as it:
        log = await it.started()
        it.client.generate("r1")
        it.client.generate_badly("r1", max_tokens="many")
        for _ in range(2):
            error = await it.client.next()
            assert (error["code"], error["ref"], error["status"]) == ("duplicate_id", "r1", 409)
        say(log, "still here")
        end(log)
        assert (await it.client.until("done", "r1"))[0]["text"] == "still here"
        assert len(it.engine.logs) == 1


async def test_one_request_too_many_is_refused_and_room_is_there_again_after_a_terminal() -> None:
    async with connect(max_streams=1) as it:
        log = await it.started("a")
        it.client.generate("b")
        error = await it.client.next()
        assert (error["code"], error["id"], error["retryable"]) == ("too_many_streams", "b", True)
        assert error["retry_after_ms"] > 0
        end(log)
        await it.client.until("done", "a")
        await it.started("c")


async def test_what_the_engine_cannot_do_is_refused_by_name() -> None:
    async with connect() as it:
        await it.client.next()
        it.client.generate("r1", delivery={"values": True})
        error = await it.client.next()
        assert (error["code"], error["param"], error["id"]) == ("unsupported_feature", "delivery.values", "r1")
        assert not it.engine.logs


async def test_asking_for_what_happens_anyway_is_no_fault() -> None:
    async with connect() as it:
        await it.started(
            logprobs=False,
            top_logprobs=0,
            frequency_penalty=0,
            repetition_penalty=1.0,
            logit_bias={},
            response_format={"type": "text"},
            tools=[],
            tool_choice="none",
            priority=0,
            metadata={"user": "me"},
            model="fake",
            x_trace="abc",
        )


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "other"}, "model_not_found", "model"),
        ({"temperature": -1}, "invalid_request", "temperature"),
        ({"temprature": 1}, "invalid_request", "temprature"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"n": 2}, "invalid_request", "n"),
        ({"tenant": "somebody"}, "invalid_request", "tenant"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"logit_bias": {"abc": 1}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "invalid_request", "logit_bias"),
        ({"min_tokens": 3, "max_tokens": 2}, "invalid_request", "min_tokens"),
        ({"token_ids": [1]}, "invalid_request", "token_ids"),
    ],
)
async def test_a_bad_request_ends_with_an_error_that_names_the_field(fields: Message, code: str, param: str) -> None:
    async with connect() as it:
        await it.client.next()
        it.client.generate_badly("r1", **fields)
        error = await it.client.next()
        assert (error["code"], error["param"], error["id"]) == (code, param, "r1")
        await it.started("r1")


@pytest.mark.parametrize(
    ("refusal", "code", "retryable"),
    [
        (ContextLengthExceeded("300 of 256 tokens", param="max_tokens"), "context_length_exceeded", False),
        (Overloaded("512 requests wait"), "overloaded", True),
        (ValueError("a bug"), "internal", False),
    ],
)
async def test_what_the_engine_refuses_ends_that_request_alone(refusal: Exception, code: str, retryable: bool) -> None:
    async with connect() as it:
        await it.client.next()
        it.engine.refusal = refusal
        it.client.generate("r1")
        error = await it.client.next()
        assert (error["code"], error["id"], error["retryable"]) == (code, "r1", retryable)
        assert ("retry_after_ms" in error) is retryable
        assert "bug" not in error["message"]
        it.engine.refusal = None
        await it.started("r1")


async def test_the_third_frame_that_is_no_json_closes_the_connection() -> None:
    async with connect() as it:
        await it.client.next()
        for frame in ("{", '{"type": "ping", "type": "ping"}', "nope"):
            it.client.send_raw(frame)
            assert (await it.client.next())["code"] == "invalid_json"
        assert await it.closed() == 4400


@pytest.mark.parametrize(
    ("frame", "code", "ref"),
    [
        (b"\x00", "invalid_message", None),
        ("[]", "invalid_message", None),
        ('{"type": "fly", "id": "x"}', "unknown_type", "x"),
        ('{"type": "init"}', "invalid_message", None),
        ('{"type": "cancel"}', "invalid_message", None),
    ],
)
async def test_a_bad_message_harms_nothing(frame: str | bytes, code: str, ref: str | None) -> None:
    async with connect() as it:
        log = await it.started()
        it.client.send_raw(frame)
        error = await it.client.next()
        assert (error["code"], error.get("ref"), "id" in error) == (code, ref, False)
        end(log)
        await it.client.until("done", "r1")


async def test_a_ping_is_answered() -> None:
    async with connect() as it:
        await it.client.next()
        it.client.send("ping", t=12.5)
        pong = await it.client.next()
        assert (pong["type"], pong["t"]) == ("pong", 12.5)


async def test_a_cancel_aborts_once_and_is_answered_when_the_engine_has_let_go() -> None:
    async with connect() as it:
        log = await it.started()
        say(log, "ab")
        await it.client.next()
        for id in ("r1", "r1", "nobody"):
            it.client.send("cancel", id=id)
        await anyio.wait_all_tasks_blocked()
        assert it.engine.aborts == [(log, "client")]
        assert it.client.unread() == 0
        end(log, "cancelled", "client")
        (done,) = await it.client.until("done", "r1")
        assert (done["finish_reason"], done["cause"], done["seq"]) == ("cancelled", "client", 3)


async def test_a_cancel_that_overtakes_the_submit_is_carried_out_after_it() -> None:
    async with connect() as it:
        it.engine.may_submit = anyio.Event()
        it.client.generate("r1")
        it.client.send("cancel", id="r1")
        await anyio.wait_all_tasks_blocked()
        it.engine.may_submit.set()
        await it.client.until("accepted", "r1")
        assert it.engine.aborts == [(it.engine.logs[0], "client")]


async def test_a_failure_of_the_engine_ends_the_stream_with_what_was_used() -> None:
    async with connect() as it:
        log = await it.started()
        say(log, "abc")
        await it.client.next()
        log.fail(EngineFailure("the core died"))
        log.wake()
        error = await it.client.next()
        assert (error["code"], error["id"], error["seq"], error["retryable"]) == ("engine_error", "r1", 3, True)
        assert error["usage"]["completion_tokens"] == 3


async def test_a_normal_close_aborts_everything_that_was_open() -> None:
    async with connect() as it:
        logs = [await it.started("a"), await it.started("b")]
        await it.left(1000)
        assert it.engine.aborts == [(log, "disconnect") for log in logs]


async def test_a_writer_that_fails_first_does_not_skip_the_abort() -> None:
    async with connect() as it:
        log = await it.started(delivery={"on_disconnect": "cancel"})
        it.client.broken = True
        say(log, "a")
        with anyio.fail_after(PATIENCE_S):
            await it.ended.wait()
        assert it.engine.aborts == [(log, "disconnect")]


async def test_a_request_that_is_still_being_read_at_the_disconnect_is_never_taken() -> None:
    async with connect() as it:
        it.engine.may_submit = anyio.Event()
        it.client.generate("r1")
        with anyio.fail_after(PATIENCE_S):
            await it.engine.submitting.wait()
        it.client.disconnect()
        with anyio.fail_after(PATIENCE_S):
            await it.ended.wait()
        assert (it.engine.logs, it.engine.aborts) == ([], [])


async def test_an_idle_connection_hears_a_heartbeat() -> None:
    async with connect(heartbeat_s=0.1) as it:
        kinds = [(await it.client.next())["type"] for _ in range(3)]
        assert kinds == ["hello", "heartbeat", "heartbeat"]


async def test_a_waiting_request_hears_progress_on_change_and_every_heartbeat_but_not_too_often() -> None:
    async with connect(heartbeat_s=0.5) as it:
        log = await it.started()
        begun = anyio.current_time()
        log.started = True
        for log.computed in range(1, 6):
            log.wake()
            await anyio.wait_all_tasks_blocked()
        changed = await it.client.next()
        assert (changed["phase"], changed["prefilled_tokens"]) == ("prefill", 5)
        assert anyio.current_time() - begun > 0.15
        assert (await it.client.next()) == changed
        say(log, "a")
        assert (await it.client.next())["type"] == "delta"


async def test_a_client_that_never_reads_its_answers_is_no_longer_read() -> None:
    async with connect(message_burst=2000) as it:
        await it.client.next()
        await it.started()
        it.client.block()
        say(it.engine.logs[0], "a")
        for t in range(1000):
            it.client.send("ping", t=t)
        await anyio.wait_all_tasks_blocked()
        assert it.client._server.statistics().current_buffer_used > 500
        it.client.unblock()
        pongs = [(await it.client.next("delta", "heartbeat"))["t"] for _ in range(1000)]
        assert pongs == list(range(1000))


async def test_going_away_refuses_what_is_new_and_lets_what_runs_finish() -> None:
    async with connect() as it:
        log = await it.started()
        it.session.go_away("shutdown", 30)
        assert (await it.client.next()) == {
            "type": "goaway", "reason": "shutdown", "deadline_ms": 30000, "reconnect": True
        }  # fmt: skip
        it.client.generate("r2")
        error = await it.client.next()
        assert (error["code"], error["id"], error["retryable"]) == ("shutting_down", "r2", True)
        say(log, "to the end")
        end(log)
        assert (await it.client.until("done", "r1"))[0]["text"] == "to the end"
        assert await it.closed() == 1001


async def test_a_stream_that_the_shutdown_cuts_closes_with_restart() -> None:
    async with connect() as it:
        log = await it.started()
        it.session.go_away("shutdown", 0)
        end(log, "cancelled", "shutdown")
        done = (await it.client.until("done", "r1"))[-1]
        assert done["cause"] == "shutdown"
        assert await it.closed() == 1012


async def test_an_idle_connection_goes_away_at_once() -> None:
    async with connect() as it:
        await it.client.next()
        it.session.go_away("shutdown", 30)
        assert (await it.client.next())["type"] == "goaway"
        assert await it.closed() == 1001


async def test_an_answer_to_a_bad_message_is_short_however_long_that_was() -> None:
    long = "x" * 200_000
    async with connect() as it:
        await it.client.next()
        for fields in (
            {"model": long},
            {long: 1},
            {"logit_bias": {long: 1}},
            {"delivery": {long: 1}},
            {"n": long},
        ):
            it.client.generate_badly("r1", **fields)
            message = await it.client.next()
            assert (message["type"], len(json.dumps(message)) < 700) == ("error", True), message


async def test_a_long_message_is_decoded_beside_the_event_loop_and_in_its_turn() -> None:
    async with connect() as it:
        it.client.generate("r1", prompt="x" * 200_000)
        it.client.send("cancel", id="r1")
        messages = [await it.client.next() for _ in range(2)]
        assert [message["type"] for message in messages] == ["hello", "accepted"]
        assert [cause for _, cause in it.engine.aborts] == ["client"]
