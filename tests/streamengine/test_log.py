"""A log is read in any slices by anybody and ends once; its stopwatch is right and small."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamengine.errors import EngineFailure, InvalidRequest
from streamengine.log import Log, Outcome, Usage
from streamengine.timing import Stopwatch, Timing


class Bell:
    def __init__(self) -> None:
        self.rung = 0

    def set(self) -> None:
        self.rung += 1


def outcome(log: Log) -> Outcome:
    return Outcome(finish_reason="stop", usage=log.usage, timing=Timing(total_ms=1))


def test_a_reader_takes_everything_new_as_one_slice() -> None:
    log = Log("st_1", prompt_tokens=3)
    reader = log.reader(Bell())
    assert reader.take() is None
    log.append([(7, "a"), (8, ""), (9, "bc")])
    delta = reader.take()
    assert delta is not None
    assert (delta.seq, delta.n, delta.text, delta.token_ids) == (3, 3, "abc", (7, 8, 9))
    assert (reader.take(), reader.ended) == (None, False)
    log.end(outcome(log))
    assert reader.ended
    assert log.usage == Usage(prompt_tokens=3, completion_tokens=3)


@given(
    st.lists(st.text(max_size=3), max_size=30),
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
)
def test_any_slicing_by_any_readers_joins_to_the_same_text(texts: list[str], one: list[int], other: list[int]) -> None:
    log = Log("st_1")
    readers = [(log.reader(Bell()), one), (log.reader(Bell()), other)]
    joined = ["", ""]
    for i, text in enumerate(texts):
        log.append([(i, text)])
        for j, (reader, limits) in enumerate(readers):
            before = reader.position
            if limits[i % len(limits)] and (delta := reader.take(limits[i % len(limits)])):
                assert delta.seq - delta.n == before
                assert delta.token_ids == tuple(range(before, delta.seq))
                joined[j] += delta.text
    log.end(outcome(log))
    for j, (reader, _) in enumerate(readers):
        while delta := reader.take(2):
            joined[j] += delta.text
        assert reader.ended
    whole = "".join(texts)
    assert joined == [whole, whole]
    assert log.text == whole
    assert log.check == (len(whole.encode()), zlib.crc32(whole.encode()))


def test_readers_are_woken_once_for_all_that_a_step_changed() -> None:
    log = Log("st_1")
    bells = [Bell(), Bell()]
    readers = [log.reader(bell) for bell in bells]
    log.append([(1, "a"), (2, "b")])
    log.append([(3, "c")])
    log.wake()
    assert [bell.rung for bell in bells] == [1, 1]
    readers[0].close()
    readers[0].close()
    log.wake()
    assert [bell.rung for bell in bells] == [1, 2]


def test_two_readers_may_share_one_wake() -> None:
    log, bell = Log("st_1"), Bell()
    first, second = log.reader(bell), log.reader(bell)
    first.close()
    log.wake()
    assert bell.rung == 1
    second.close()
    log.wake()
    assert bell.rung == 1


def test_a_reader_begins_after_a_position() -> None:
    log = Log("st_1")
    log.append([(1, "a"), (2, "b")])
    delta = log.reader(Bell(), after=1).take()
    assert delta is not None
    assert (delta.seq, delta.text) == (2, "b")
    assert log.reader(Bell(), after=2).take() is None
    for after in (-1, 3):
        with pytest.raises(InvalidRequest, match="after must be 0 to 2"):
            log.reader(Bell(), after=after)


def test_a_failed_log_keeps_its_usage() -> None:
    log = Log("st_1", prompt_tokens=5)
    log.append([(1, "a")])
    log.fail(EngineFailure("gone"))
    assert log.ended
    assert log.error_usage == Usage(prompt_tokens=5, completion_tokens=1)
    assert log.outcome is None


def test_times_are_those_of_the_tokens() -> None:
    watch = Stopwatch(10.0)
    watch.start(0.5)
    watch.tokens(1, 12.0)
    for i in range(1, 101):
        watch.tokens(1, 12.0 + i * 0.1)
    watch.tokens(0, 50.0)
    watch.tokens(1, 23.0)
    timing = watch.timing(23.5)
    assert timing.total_ms == pytest.approx(13_500)
    assert timing.queue_ms == pytest.approx(500)
    assert timing.ttft_ms == pytest.approx(2000)
    assert timing.prefill_ms == pytest.approx(1500)
    assert timing.decode_ms == pytest.approx(11_000)
    assert timing.tokens_per_s == pytest.approx(101 / 11)
    assert timing.itl_p50_ms == pytest.approx(100, rel=0.03)
    assert timing.itl_p99_ms == pytest.approx(100, rel=0.03)
    assert timing.itl_max_ms == pytest.approx(1000)


def test_what_did_not_happen_has_no_time() -> None:
    watch = Stopwatch(1.0)
    assert watch.timing(2.0) == Timing(total_ms=1000.0)
    watch.tokens(1, 3.0)
    timing = watch.timing(3.0)
    assert (timing.ttft_ms, timing.itl_p50_ms, timing.tokens_per_s) == (2000.0, None, None)


def test_tokens_of_one_step_have_no_gap_between_them() -> None:
    watch = Stopwatch(0.0)
    watch.tokens(4, 1.0)
    timing = watch.timing(1.0)
    assert (timing.itl_p50_ms, timing.itl_max_ms, timing.tokens_per_s) == (0.0, 0.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_close_to_exact_and_memory_is_bounded(gaps: list[float]) -> None:
    watch, now = Stopwatch(0.0), 0.0
    watch.tokens(1, now)
    for gap in gaps:
        now += gap
        watch.tokens(1, now)
    timing = watch.timing(now)
    exact = sorted(gaps)[max(0, -(-len(gaps) // 2) - 1)]
    if 1e-3 < exact < 1e5:
        assert timing.itl_p50_ms == pytest.approx(exact * 1000, rel=0.06)
    assert len(watch._buckets) <= 530
