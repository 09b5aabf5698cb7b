"""Pages with several owners: the prefix cache, several answers to one prompt, windows."""

import pytest

from compiled.step import PADDING_PAGE, Sampling
from streamengine.errors import ContextLengthExceeded, InvalidRequest
from streamengine.request import Finish
from tests.fakes import logprob
from tests.scheduling import Bench

both_depths = pytest.mark.parametrize("depth", [1, 2])
SEEDED = Sampling(temperature=1.0, seed=42)


def computed(bench: Bench) -> int:
    """Tokens in all steps so far."""
    return sum(len(row.tokens) for step in bench.runner.steps for row in step.rows)


# prefixes


def test_a_prompt_that_was_computed_before_is_not_computed_again():
    bench = Bench(prefix=True)
    first = bench.submit(b"a long preamble, question one", 3)
    bench.run()
    second = bench.submit(b"a long preamble, question two", 3)
    before = computed(bench)
    bench.run()
    assert computed(bench) - before == 29 - 24 + 2, "six pages were there, and the last token needs no KV"
    assert [bench.answers[id] for id in (first, second)] == [bench.expected(id) for id in (first, second)]


def test_what_was_found_is_told_once_with_the_first_step():
    bench = Bench(prefix=True, budget=8)
    for _ in range(2):
        bench.submit(b"0123456789abcdefghij", 2)
        bench.run()
    assert [delta.cached for delta in bench.deltas if delta.request == 1] == [0, 0, 0, 0]
    assert [delta.cached for delta in bench.deltas if delta.request == 2] == [16, 0]


def test_a_prompt_that_is_all_there_still_computes_its_last_token():
    bench = Bench(prefix=True)
    for _ in range(2):
        id = bench.submit(b"01234567", 2)
        bench.run()
        assert bench.answers[id] == bench.expected(id)
    assert bench.runner.steps[-2].rows[0].start == 4, "of two pages one may be found"


def test_an_answer_is_found_by_the_next_turn_of_the_conversation():
    bench = Bench(prefix=True)
    first = bench.submit(b"question", 8)
    bench.run()
    second = bench.submit(b"question" + bytes(bench.answers[first]) + b"and?", 2)
    bench.run()
    assert next(delta.cached for delta in bench.deltas if delta.request == second) == 12


def test_what_the_same_step_computes_is_not_found():
    bench = Bench(prefix=True)
    bench.submit(b"01234567x", 2)
    bench.submit(b"01234567y", 2)
    step = bench.launch()
    assert step is not None and [row.start for row in step.rows] == [0, 0]
    bench.run()


@both_depths
def test_a_preempted_request_finds_its_own_pages_again(depth):
    bench = Bench(usable_pages=6, depth=depth, prefix=True)
    ids = [bench.submit(7, 10), bench.submit(7, 10)]
    bench.run()
    assert bench.preemptions >= 1
    statistics = bench.scheduler.statistics()
    assert statistics["prefix_hits"] >= 4
    assert [bench.answers[id] for id in ids] == [bench.expected(id) for id in ids]


def test_tenants_find_nothing_of_each_other():
    bench = Bench(prefix=True)
    for tenant in ("alice", "bob", "alice"):
        bench.submit(b"the same long prompt", 2, tenant=tenant)
        bench.run()
    assert [delta.cached for delta in bench.deltas if delta.queued_s is not None] == [0, 0, 16]


def test_prompt_logprobs_are_complete_though_the_prompt_was_computed_before():
    bench = Bench(prefix=True, budget=8)
    prompt = b"the same long prompt"
    expected = [logprob(prompt[:place], prompt[place], 2) for place in range(1, len(prompt))]
    for _ in range(2):
        id = bench.submit(prompt, 2, prompt_logprobs=2)
        bench.run()
        assert [one for d in bench.deltas if d.request == id for one in d.prompt_logprobs] == expected
    bench.submit(prompt, 2)
    bench.run()
    assert bench.deltas[-2].cached == 16, "they were cached all the same"


def test_cached_pages_are_no_obstacle_for_whoever_needs_room():
    bench = Bench(usable_pages=8, prefix=True)
    for _ in range(6):
        id = bench.submit(24, 9)
        bench.run()
        assert bench.answers[id] == bench.expected(id)


# several answers


@both_depths
@pytest.mark.parametrize("prompt", [1, 7, 8, 9])
def test_each_answer_is_the_one_that_its_seed_gives_alone(prompt, depth):
    bench = Bench(depth=depth)
    id = bench.submit(prompt, 6, SEEDED, n=3)
    bench.run()
    answers = [bench.answer(id, index) for index in range(3)]
    assert answers == [bench.expected(id, index) for index in range(3)]
    assert answers[0] != answers[1]


def test_the_seed_behind_the_highest_is_the_lowest():
    bench = Bench()
    bench.submit(3, 2, Sampling(temperature=1.0, seed=2**63 - 1), n=2)
    bench.run()
    seeds = [row.sampling.seed for row in bench.runner.steps[1].rows if row.sampling]
    assert seeds == [2**63 - 1, -(2**63)]


def test_the_prompt_is_computed_once_and_its_full_pages_are_shared():
    bench = Bench()
    bench.submit(10, 3, SEEDED, n=3)
    bench.turn()
    bench.turn()
    first, second = bench.runner.steps
    assert [len(row.tokens) for row in first.rows] == [10]
    assert [len(row.tokens) for row in second.rows] == [1, 1, 1]
    tables = [row.pages for row in second.rows]
    assert len({table[:2] for table in tables}) == 1 and len({table[2] for table in tables}) == 3
    assert second.copies == ((tables[0][2], tables[1][2]), (tables[0][2], tables[2][2]))
    bench.run()


def test_a_prompt_that_ends_with_a_page_is_forked_before_that_page():
    """The last token is computed again by each answer, and a page that is written belongs to one of them."""
    bench = Bench()
    bench.submit(8, 3, SEEDED, n=2)
    bench.turn()
    bench.turn()
    assert len(bench.runner.steps[1].copies) == 1
    bench.run()


def test_all_answers_are_admitted_or_none():
    bench = Bench(max_num_seqs=3)
    bench.submit(3, 6)
    group = bench.submit(3, 6, SEEDED, n=3)
    bench.turn()
    assert group not in bench.running
    bench.run()
    assert [bench.answer(group, index) for index in range(3)] == [bench.expected(group, i) for i in range(3)]


def test_seats_are_kept_for_answers_that_are_still_to_begin():
    bench = Bench(max_num_seqs=3, budget=4)
    bench.submit(12, 2, SEEDED, n=3)
    bench.submit(3, 2)
    while len(bench.running) != 3:
        bench.turn()
        assert set(bench.running) == {1}
    bench.run()


def test_more_answers_than_sequences_may_run_are_refused_with_both_numbers():
    bench = Bench(max_num_seqs=3)
    with pytest.raises(InvalidRequest, match="n is 4; at most 3 sequences run at once") as caught:
        bench.submit(3, 2, n=4)
    assert caught.value.param == "n"


def test_answers_that_could_never_be_held_together_are_refused_with_both_numbers():
    bench = Bench(usable_pages=7)
    bench.submit(8, 9, n=2)  # one shared page, and three each
    with pytest.raises(ContextLengthExceeded, match="2 times, need 9 KV pages of 4 tokens; there are 7"):
        bench.submit(8, 10, n=2)


@both_depths
@pytest.mark.parametrize("turns", range(7))
def test_an_abort_ends_every_answer_whatever_each_was_doing(turns, depth):
    bench = Bench(budget=8, depth=depth)
    other = bench.submit(3, 8)
    id = bench.submit(20, 4, SEEDED, n=3)
    for _ in range(turns):
        bench.turn()
    if depth == 2:
        bench.launch()
    bench.abort(id)
    assert [bench.ends[id, index] for index in range(3)] == [Finish("cancelled", "client")] * 3
    assert bench.abort(id) == []
    bench.run()
    assert bench.answers[other] == bench.expected(other)
    for index in range(3):
        answer = bench.answer(id, index)
        assert answer == bench.expected(id, index)[: len(answer)]


def test_an_answer_that_ends_gives_back_its_own_pages_and_the_others_go_on():
    bench = Bench()
    probe = Bench()
    probe.submit(10, 12, SEEDED, n=2)
    stop = next(token for token in probe.expected(1, 1) if token not in probe.expected(1, 0))
    id = bench.submit(10, 12, SEEDED, (stop,), n=2)
    while (id, 1) not in bench.ends:
        bench.turn()
    assert bench.running == [id]
    assert bench.pool.statistics()["kv_pages_used"] == len(bench.scheduler._running[0].pages)
    bench.run()
    assert [bench.answer(id, index) for index in range(2)] == [bench.expected(id, index) for index in range(2)]


def test_a_step_that_raises_ends_all_answers_of_its_requests():
    bench = Bench()
    id = bench.submit(10, 4, SEEDED, n=2)
    bench.turn()
    bench.runner.fail()
    bench.turn()
    assert {bench.ends[id, index].reason for index in range(2)} == {"error"}
    assert bench.pool.available == bench.pool.capacity


@pytest.mark.parametrize("prefix", [False, True])
@both_depths
def test_answers_that_are_preempted_come_back_with_the_same_tokens(depth, prefix):
    bench = Bench(usable_pages=12, depth=depth, prefix=prefix)
    ids = [bench.submit(3, 20, SEEDED, n=2), bench.submit(2, 20, SEEDED, n=2)]
    bench.run()
    assert bench.preemptions >= 1
    for id in ids:
        assert [bench.answer(id, index) for index in range(2)] == [bench.expected(id, index) for index in range(2)]


# windows


@both_depths
def test_pages_that_fell_out_of_the_window_are_given_back(depth):
    bench = Bench(window=6, depth=depth)
    id = bench.submit(5, 40)
    used = []
    while bench.scheduler.has_work or bench.in_flight:
        bench.turn()
        used.append(bench.pool.statistics()["kv_pages_used"])
    assert max(used) <= 4
    assert bench.answers[id] == bench.expected(id)
    assert bench.runner.steps[-1].rows[0].pages[:8] == (PADDING_PAGE,) * 8


def test_a_prompts_pages_are_given_back_while_it_goes_in():
    bench = Bench(window=4, budget=8)
    bench.submit(40, 2)
    bench.turn()
    bench.turn()
    assert bench.pool.statistics()["kv_pages_used"] == 10 - 3, "pages 0 to 2 hold tokens 0 to 11; 13 is the first seen"
    bench.run()


def test_a_prefix_is_found_as_long_as_no_page_of_it_was_handed_on():
    bench = Bench(window=4, prefix=True, usable_pages=16)
    prompt = bytes(range(20))
    for _ in range(2):
        id = bench.submit(prompt, 3)
        bench.run()
        assert bench.answers[id] == bench.expected(id)
    assert [delta.cached for delta in bench.deltas if delta.queued_s is not None] == [0, 16]
