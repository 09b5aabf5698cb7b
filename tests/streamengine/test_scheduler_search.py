"""Guesses at the next tokens, and beam search: what a step does for one request beyond one token."""

import pytest

from compiled.step import Sampling
from streamengine.request import Finish
from tests.fakes import beam_oracle, catchy, oracle, script
from tests.scheduling import Bench

both_depths = pytest.mark.parametrize("depth", [1, 2])
COPY = script({"abcdefgh abc": "defgh abc" + "defgh abc" * 9, "xyz": "1234567890abcdef"})


# guesses


@both_depths
def test_a_text_that_repeats_itself_takes_fewer_steps_than_tokens(depth):
    bench = Bench(answer=COPY, depth=depth)
    id = bench.submit(b"abcdefgh abc", 20, speculate=4)
    bench.run()
    assert bytes(bench.answers[id]) == b"defgh abcdefgh abcde"
    assert len(bench.runner.steps) <= 1 + 20 / 5 + 1
    statistics = bench.scheduler.statistics()
    assert statistics["draft_tokens"] >= statistics["accepted_tokens"] >= 14


@both_depths
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)])
@pytest.mark.parametrize("speculate", [1, 3, 8])
def test_guesses_never_change_a_token(speculate, sampling, depth):
    bench = Bench(answer=catchy, depth=depth)
    ids = [bench.submit(b"ababab" * n, 30, sampling, speculate=speculate) for n in (1, 2, 3)]
    bench.run()
    assert [bench.answers[id] for id in ids] == [bench.expected(id) for id in ids]
    assert bench.scheduler.statistics()["accepted_tokens"] > 0


def test_a_stop_token_among_right_guesses_ends_the_answer_there():
    bench = Bench(answer=COPY)
    id = bench.submit(b"abcdefgh abc", 20, stop_token_ids=(ord("f"),), speculate=6)
    bench.run()
    assert bytes(bench.answers[id]) == b"def" and bench.finishes[id] == Finish("stop", "stop_token")
    assert bench.deltas[-1].tokens == tuple(b"ef"), "they came in one step"


def test_no_more_is_guessed_than_may_come():
    bench = Bench(answer=COPY)
    id = bench.submit(b"abcdefgh abc", 3, speculate=8)
    bench.run()
    assert bytes(bench.answers[id]) == b"def"
    assert [row.drafts for step in bench.runner.steps for row in step.rows] == [0, 1]


def test_guesses_leave_every_other_request_its_token():
    bench = Bench(answer=COPY, budget=4, max_num_seqs=4)
    bench.submit(b"abcdefgh abc", 80, speculate=8)
    others = [bench.submit(b"xyz", 16) for _ in range(2)]
    while not set(others) <= set(bench.running):
        bench.turn()
    bench.turn()
    assert [row.request for row in bench.runner.steps[-1].rows] == [1, *others], "and a waiting one its place"
    assert [row.drafts for row in bench.runner.steps[-1].rows] == [1, 0, 0]
    bench.run()


def test_guesses_take_no_page_that_somebody_will_want():
    bench = Bench(answer=COPY, usable_pages=10, page_size=4)
    first = bench.submit(b"abcdefgh abc", 17, speculate=8)
    second = bench.submit(b"xyz", 8)
    bench.run()
    assert bench.preemptions == 0
    assert [bench.answers[id] for id in (first, second)] == [bench.expected(id) for id in (first, second)]


def test_a_request_whose_sampling_looks_at_the_answer_is_not_guessed_for():
    bench = Bench(answer=COPY)
    bench.submit(b"abcdefgh abc", 6, Sampling(repetition_penalty=1.1), speculate=4)
    bench.run()
    assert bench.scheduler.statistics()["draft_tokens"] == 0


def test_every_token_of_a_right_guess_has_its_logprob():
    bench = Bench(answer=COPY)
    bench.submit(b"abcdefgh abc", 12, Sampling(logprobs=0), speculate=4)
    bench.run()
    assert [one.token for delta in bench.deltas for one in delta.logprobs] == [
        t for d in bench.deltas for t in d.tokens
    ]
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in bench.deltas)


# beams


@both_depths
@pytest.mark.parametrize(("width", "n"), [(1, 1), (2, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_the_answers_are_those_of_a_plain_search_that_never_ends_early(width, n, length_penalty, depth):
    bench = Bench(depth=depth)
    for prompt in (b"hello", b"a page of", b"12345678"):
        stops = tuple(b"aeiou")
        id = bench.submit(prompt, 9, stop_token_ids=stops, beam_width=width, n=n, length_penalty=length_penalty)
        bench.run()
        expected = beam_oracle(prompt, 9, width, n=n, length_penalty=length_penalty, stop_token_ids=stops)
        told = [delta for delta in bench.deltas if delta.request == id and delta.finish is not None]
        assert [(list(delta.tokens), delta.beam_score) for delta in told] == expected
        assert [delta.index for delta in told] == list(range(n))
        for delta in told:
            assert delta.finish is not None
            assert (delta.finish.reason == "stop") == (delta.tokens[-1] in stops)


def test_a_search_of_one_beam_is_greedy():
    bench = Bench()
    id = bench.submit(b"hello", 8, beam_width=1)
    bench.run()
    assert bench.answers[id] == oracle(b"hello", 8)


def test_a_search_ends_when_nothing_can_be_better_any_more():
    bench = Bench(max_model_len=256)
    bench.submit(b"hello", 100, stop_token_ids=tuple(range(ord("a"), ord("w"))), beam_width=2, length_penalty=0.0)
    bench.run()
    assert len(bench.runner.steps) < 20


def test_nothing_is_told_before_the_end_but_how_far_the_prompt_is():
    bench = Bench(budget=8)
    bench.submit(20, 3, beam_width=2, n=2)
    bench.run()
    told = [(delta.computed, delta.tokens != (), delta.queued_s) for delta in bench.deltas]
    assert told == [(8, False, 0.0), (16, False, None), (20, False, None), (20, True, None), (20, True, None)]


def test_beams_share_their_beginnings():
    bench = Bench()
    bench.submit(16, 6, beam_width=4)
    most = 0.0
    while bench.scheduler.has_work:
        bench.turn()
        most = max(most, bench.pool.statistics()["kv_pages_used"])
    assert most <= 4 + 4 * 2, "four pages of the prompt, and what is behind it of each beam"


@both_depths
def test_a_search_that_is_preempted_begins_again_and_finds_the_same(depth):
    bench = Bench(usable_pages=16, depth=depth)
    first = bench.submit(3, 45)
    id = bench.submit(b"hello", 26, beam_width=2, n=2)
    bench.run()
    assert bench.preemptions >= 1
    assert bench.answers[first] == bench.expected(first)
    expected = beam_oracle(b"hello", 26, 2, n=2)
    assert [bench.answer(id, index) for index in range(2)] == [answer for answer, _ in expected]


@both_depths
@pytest.mark.parametrize("turns", range(6))
def test_an_abort_in_the_middle_of_a_search_leaves_nothing_behind(turns, depth):
    bench = Bench(budget=8, depth=depth)
    id = bench.submit(12, 6, beam_width=3, n=2)
    for _ in range(turns):
        bench.turn()
    if depth == 2:
        bench.launch()
    bench.abort(id)
    assert [bench.ends[id, index] for index in range(2)] == [Finish("cancelled", "client")] * 2
    assert bench.pool.available == bench.pool.capacity and not bench.scheduler.has_work
    bench.run()
