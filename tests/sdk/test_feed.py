"""One request without I/O: what is acknowledged, when it is too late, how it goes on on another connection."""

from typing import Any

import pytest

from streamengine_sdk import EngineError, ProtocolError, StreamLost, Timeout, Timeouts, ToolCall, wire
from streamengine_sdk.feed import Feed

STREAM = "st_0123456789abcdef"


class Carrier:
    def __init__(self) -> None:
        self.said: list[wire.ClientMessage] = []

    def post(self, message: wire.ClientMessage) -> None:
        self.said.append(message)


def feed(timeouts: Timeouts | None = None, *, accepted: bool = True, now: float = 0, **delivery: Any) -> Feed:
    request = wire.Generate(id="r1", prompt="hi", key="12345678", delivery=wire.Delivery(**delivery))
    made = Feed(request, timeouts or Timeouts(), now)
    made.carrier = Carrier()
    if accepted:
        made.receive(wire.Accepted(id="r1", stream=STREAM, after=0), now, "e1")
    return made


def said(it: Feed) -> list[wire.ClientMessage]:
    assert isinstance(it.carrier, Carrier)
    return it.carrier.said


def say(it: Feed, *texts: str, now: float = 0, **fields: Any) -> None:
    for text in texts:
        it.receive(wire.Delta(id="r1", seq=it.seq + 1, text=text, **fields), now)


# acknowledgements


@pytest.mark.parametrize(("window", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 3, 4, 5]), (4, [2, 4]), (5, [2, 4])])
def test_half_a_window_is_acknowledged_when_it_was_taken_not_when_it_came(window: int, expected: list[int]) -> None:
    it = feed(window=window)
    say(it, *"abcde")
    assert said(it) == []
    while it.events:
        it.take(0)
    assert said(it) == [wire.Ack(id="r1", seq=seq) for seq in expected]


def test_without_a_window_nothing_is_acknowledged() -> None:
    it = feed()
    say(it, *"abcde")
    while it.events:
        it.take(0)
    it.wait_for_end(0, 1)
    assert said(it) == []


def test_whoever_waits_for_the_whole_answer_takes_all_that_comes() -> None:
    it = feed(window=4)
    say(it, *"abc")
    it.wait_for_end(0, 1)
    assert said(it) == [wire.Ack(id="r1", seq=3)]
    say(it, *"de")
    assert said(it)[1:] == [wire.Ack(id="r1", seq=5)]
    it.wait_for_end(0, -1)
    say(it, *"fghi")
    assert len(said(it)) == 2


def test_a_stream_that_was_dropped_as_slow_goes_on_where_it_was_when_it_is_read_again() -> None:
    it = feed(window=4)
    say(it, *"abcd")
    slow = wire.Error(code="slow_consumer", message="slow", status=429, retryable=True, id="r1", stream=STREAM, seq=4)
    assert not it.receive(slow, 60)
    it.take(60)
    it.take(60)
    assert said(it) == []  # nothing to acknowledge: the server shows it no more
    it.go_on()
    it.go_on()
    assert said(it) == [wire.Attach(id="r1", stream=STREAM, after=4, delivery=wire.Delivery(window=4))]
    it.receive(wire.Accepted(id="r1", stream=STREAM, after=4), 60, "e1")
    say(it, *"ef")
    while it.events:
        it.take(60)
    assert said(it)[1:] == [wire.Ack(id="r1", seq=6)]
    assert it.result().text == "abcdef"


# on another connection


def test_what_was_not_accepted_is_asked_again_with_the_same_key() -> None:
    it = feed(accepted=False)
    assert it.opening("e1") == it.opening("e2") == it.request


def test_what_was_accepted_is_attached_after_its_last_token() -> None:
    it = feed(window=8)
    say(it, *"abc")
    expected = wire.Attach(id="r1", stream=STREAM, after=3, delivery=wire.Delivery(window=8))
    assert it.opening("e1") == expected


def test_after_a_restart_a_stream_is_lost_if_any_of_it_was_seen_and_started_again_if_not() -> None:
    unseen, seen = feed(), feed()
    assert unseen.opening("e2") == unseen.request
    unseen.receive(wire.Accepted(id="r1", stream="st_another0123456789", after=0), 0, "e2")
    assert unseen.stream_id == "st_another0123456789"
    say(seen, "a")
    with pytest.raises(StreamLost, match="restarted"):
        seen.opening("e2")


def test_a_resumed_stream_is_not_started_again_by_anybody() -> None:
    it = Feed(wire.Attach(id="r1", stream=STREAM, after=0), Timeouts(), 0)
    it.receive(wire.Accepted(id="r1", stream=STREAM, after=0), 0, "e1")
    with pytest.raises(StreamLost):
        it.opening("e2")


def test_a_server_that_goes_on_elsewhere_is_found_out() -> None:
    it = feed()
    say(it, "a")
    assert it.receive(wire.Accepted(id="r1", stream=STREAM, after=0), 0, "e1")
    assert isinstance(it.error, ProtocolError)
    assert said(it) == [wire.Cancel(id="r1")]


def test_a_cancel_is_said_once_and_not_after_the_end() -> None:
    it = feed()
    it.cancel()
    it.cancel()
    assert said(it) == [wire.Cancel(id="r1")]
    over = feed()
    over.fail(EngineError("no"))
    over.cancel()
    assert said(over) == []


# deadlines


def timeout_of(it: Feed, now: float, *, waiting: bool = True) -> str | None:
    it.expire(now, waiting=waiting)
    return it.error.kind if isinstance(it.error, Timeout) else None


def test_the_first_token_has_its_own_deadline_counted_from_sending() -> None:
    it = feed(Timeouts(first_token=60, between=1), now=100)
    assert it.deadline() == (160, "first_token")
    assert timeout_of(it, 159.9) is None
    assert timeout_of(it, 160) == "first_token"
    assert said(it) == [wire.Cancel(id="r1")]


def test_tokens_have_a_deadline_from_one_to_the_next() -> None:
    it = feed(Timeouts(between=30))
    say(it, "a", now=50)
    it.receive(wire.Progress(id="r1", phase="decode"), 70)
    assert it.deadline() == (80, "between")
    say(it, "b", now=79)
    assert timeout_of(it, 108) is None
    assert timeout_of(it, 109) == "between"
    assert it.error is not None
    assert it.error.partial is not None
    assert it.error.partial.text == "ab"
    assert not it.events


def test_a_reader_that_took_its_time_does_not_hold_it_against_the_server() -> None:
    it = feed(Timeouts(between=30, total=None))
    say(it, "a", now=10)
    assert timeout_of(it, 1000, waiting=False) is None
    it.take(1000)
    assert it.deadline() == (1030, "between")


def test_the_total_holds_whatever_comes() -> None:
    it = feed(Timeouts(total=100, between=30))
    say(it, "a", now=99)
    assert it.deadline() == (100, "total")
    assert timeout_of(it, 100, waiting=False) == "total"


def test_the_first_deadline_that_passes_is_named() -> None:
    assert feed(Timeouts(total=5, first_token=60)).deadline() == (5, "total")
    assert feed(Timeouts(total=None, first_token=None)).deadline()[0] == float("inf")


# what arrives


def test_channels_are_kept_apart_and_checked_together() -> None:
    it = feed()
    say(it, "let me", " see", channel="reasoning")
    say(it, "It is ", "sunny.")
    say(it, '{"city":', channel="tool", call=wire.Call(index=0, id="c0", name="weather"))
    say(it, '"Rome"}', channel="tool", call=wire.Call(index=0))
    say(it, "{}", channel="tool", call=wire.Call(index=1, id="c1", name="time"))
    say(it, "♪", channel="melody")  # a newer server's
    result = it.result()
    assert (result.text, result.reasoning) == ("It is sunny.", "let me see")
    assert result.tool_calls == (
        ToolCall(id="c0", name="weather", arguments='{"city":"Rome"}'),
        ToolCall(id="c1", name="time", arguments="{}"),
    )


def test_a_value_that_comes_again_is_taken_once() -> None:
    it = feed()
    for _ in range(2):
        it.receive(wire.Value(id="r1", seq=1, path="/a", value=1), 0)
    it.receive(wire.Value(id="r1", seq=2, path="/b", value=2), 0)
    assert [event.path for event in it.events if isinstance(event, wire.Value)] == ["/a", "/b"]


def test_of_a_stream_that_is_resumed_in_the_middle_only_the_numbers_can_be_checked() -> None:
    it = Feed(wire.Attach(id="r1", stream=STREAM, after=2), Timeouts(), 0)
    say(it, "c")
    usage = wire.Usage(prompt_tokens=1, completion_tokens=3, total_tokens=4)
    done = wire.Done(id="r1", seq=4, finish_reason="stop", usage=usage, check=wire.Check(bytes=3, crc32=891568578))
    assert it.receive(done, 0)
    assert (it.result().text, it.result().seq, it.result().finish_reason) == ("c", 3, "stop")


def test_a_resume_gap_says_from_where_it_would_work() -> None:
    it = feed()
    gap = wire.Error(code="resume_gap", message="gone", status=410, retryable=False, id="r1", available_from=7)
    assert it.receive(gap, 0)
    assert isinstance(it.error, StreamLost)
    assert (it.error.available_from, it.error.code, it.error.status) == (7, "resume_gap", 410)
