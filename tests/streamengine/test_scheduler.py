import pytest

from compiled.step import Row, Sampling, Step, StepResult
from streamengine.errors import ContextLengthExceeded, Overloaded
from streamengine.request import Finish
from tests.fakes import oracle
from tests.scheduling import Bench


def shape(step: Step | None) -> list[tuple[int, int, int, bool]]:
    """``(request, start, tokens, samples)`` of each row."""
    rows: tuple[Row, ...] = step.rows if step else ()
    return [(row.request, row.start, len(row.tokens), row.sampling is not None) for row in rows]


both_depths = pytest.mark.parametrize("depth", [1, 2])


# planning


def test_an_idle_scheduler_plans_nothing():
    bench = Bench()
    assert bench.scheduler.plan(0.0) is None and not bench.scheduler.has_work


def test_a_prompt_that_fits_the_budget_samples_in_its_first_step():
    bench = Bench()
    bench.submit(5)
    assert shape(bench.launch()) == [(1, 0, 5, True)]


def test_a_long_prompt_goes_in_by_chunks_and_samples_with_the_last_one():
    bench = Bench(budget=8)
    bench.submit(20)
    steps = [bench.turn() and shape(bench.runner.steps[-1]) for _ in range(4)]
    assert steps == [[(1, 0, 8, False)], [(1, 8, 8, False)], [(1, 16, 4, True)], [(1, 20, 1, True)]]


def test_every_chunk_tells_how_much_of_the_prompt_is_there():
    bench = Bench(budget=8)
    bench.submit(20)
    told = [(delta.computed, len(delta.tokens)) for _ in range(4) for delta in bench.turn()]
    assert told == [(8, 0), (16, 0), (20, 1), (20, 1)]


@pytest.mark.parametrize("budget", range(1, 18))
def test_the_size_of_chunks_never_changes_an_answer(budget):
    bench = Bench(budget=budget)
    ids = [bench.submit(17, 5), bench.submit(3, 9)]
    bench.run()
    assert [bench.answers[id] for id in ids] == [bench.expected(id) for id in ids]


def test_those_who_decode_are_served_before_a_prompt_takes_the_rest_of_the_budget():
    bench = Bench(budget=8)
    first = bench.submit(4, 10)
    bench.turn()
    second = bench.submit(30)
    assert shape(bench.launch()) == [(first, 4, 1, True), (second, 0, 7, False)]


def test_waiting_requests_are_admitted_in_order_and_nobody_overtakes():
    bench = Bench(usable_pages=4)
    bench.submit(8, 2)  # two pages, and one more in reserve
    large, small = bench.submit(9, 2), bench.submit(1, 2)
    bench.turn()
    assert bench.running == [1], "the small one would fit, but it is not its turn"
    bench.run()
    assert list(bench.finishes) == [1, large, small]


def test_no_more_than_max_num_seqs_run_at_once():
    bench = Bench(max_num_seqs=2)
    for _ in range(3):
        bench.submit(3)
    assert [row[0] for row in shape(bench.launch())] == [1, 2]


def test_the_time_in_the_queue_is_told_once_with_the_first_step():
    bench = Bench(max_num_seqs=1)
    bench.submit(3, 1)
    second = bench.submit(3, 3)
    bench.submit(3, 1)  # the clock of the bench is at 3 now
    told = [(delta.request, delta.queued_s) for _ in range(4) for delta in bench.turn()]
    assert told == [(1, 2.0), (second, 1.0), (second, None), (second, None)]


# the end of an answer


@both_depths
def test_max_tokens_ends_an_answer_with_length(depth):
    bench = Bench(depth=depth)
    id = bench.submit(5, 3)
    bench.run()
    assert bench.finishes[id] == Finish("length", "max_tokens")
    assert bench.answers[id] == bench.expected(id) and len(bench.answers[id]) == 3


@both_depths
def test_a_stop_token_ends_an_answer_and_is_the_last_of_its_tokens(depth):
    bench = Bench(depth=depth)
    third = oracle(b"hello", 3)[-1]
    id = bench.submit(b"hello", 10, stop_token_ids=(third,))
    bench.run()
    assert bench.finishes[id] == Finish("stop", "stop_token")
    assert bench.answers[id] == bench.expected(id) and bench.answers[id][-1] == third


def test_a_stop_token_in_the_last_allowed_place_is_a_stop():
    bench = Bench()
    third = oracle(b"hello", 3)[-1]
    id = bench.submit(b"hello", 3, stop_token_ids=(third,))
    bench.run()
    assert bench.finishes[id].reason == "stop"


def test_tokens_behind_the_one_that_ends_the_answer_are_cut():
    bench = Bench()
    id = bench.submit(2, 3, stop_token_ids=(9,))
    step = bench.scheduler.plan(0.0)
    assert step is not None
    (delta,) = bench.scheduler.commit(step, StepResult(number=step.number, tokens=((7, 9, 8),), seconds=0.0))
    assert delta.request == id and delta.tokens == (7, 9)
    assert delta.finish == Finish("stop", "stop_token")


def test_the_last_token_needs_no_page_of_its_own():
    bench = Bench(usable_pages=2)
    id = bench.submit(4, 5)  # eight tokens with KV, and one without
    bench.run()
    assert bench.answers[id] == bench.expected(id)


# refusals


def test_a_request_longer_than_the_context_is_refused_with_both_numbers():
    bench = Bench(max_model_len=32)
    bench.submit(20, 12)
    with pytest.raises(ContextLengthExceeded, match="33 tokens; the context holds 32") as caught:
        bench.submit(20, 13)
    assert caught.value.details == {"tokens": 33, "max_model_len": 32}


def test_a_request_that_the_pool_can_never_hold_is_refused_with_both_numbers():
    bench = Bench(usable_pages=4)
    bench.submit(10, 7)
    with pytest.raises(ContextLengthExceeded, match="need 5 KV pages of 4 tokens; there are 4") as caught:
        bench.submit(10, 8)
    assert caught.value.details == {"pages": 5, "capacity": 4}


def test_a_full_queue_refuses_one_more_with_the_numbers_and_takes_one_again_later():
    bench = Bench(max_num_seqs=1, max_queue=1)
    bench.submit(3, 1)
    bench.submit(3, 1)
    with pytest.raises(Overloaded, match="2 requests are running or waiting; at most 1 run and 1 wait"):
        bench.submit(3, 1)
    bench.turn()
    bench.submit(3, 1)
    bench.abort(4)
    bench.run()


def test_the_same_id_twice_is_our_bug():
    bench = Bench()
    bench.submit(3)
    with pytest.raises(AssertionError, match="already here"):
        bench.scheduler.submit(bench.requests[1], 0.0)


# shortage


@both_depths
def test_when_pages_are_short_the_youngest_gives_way_and_both_answers_stay_right(depth):
    bench = Bench(usable_pages=4, depth=depth)
    ids = [bench.submit(3, 10), bench.submit(3, 10)]
    bench.run()
    assert bench.preemptions == 1
    assert [bench.answers[id] for id in ids] == [bench.expected(id) for id in ids]
    assert list(bench.finishes) == ids


@both_depths
def test_a_preempted_seeded_request_draws_the_same_tokens_again(depth):
    bench = Bench(usable_pages=4, depth=depth)
    bench.submit(3, 10)
    id = bench.submit(3, 10, sampling=Sampling(temperature=1.0, seed=42))
    bench.run()
    assert bench.preemptions == 1
    assert bench.answers[id] == bench.expected(id)


def test_a_preempted_request_waits_in_front_of_everybody_else():
    bench = Bench(usable_pages=5, max_num_seqs=2)
    bench.submit(3, 14)
    victim = bench.submit(3, 14)
    bench.submit(1, 1)
    while not bench.preemptions:
        bench.turn()
    assert bench.running == [1]
    assert bench.waiting == [victim, 3]
    bench.run()


def test_the_youngest_sits_out_with_its_pages_rather_than_lose_its_work():
    bench = Bench(usable_pages=4, page_size=4, budget=64)
    bench.submit(9, 4)  # three pages for good
    youngest = bench.submit(1, 5)  # the fourth, until it needs a second one
    bench.run()
    assert bench.preemptions == 0
    assert bench.answers[youngest] == bench.expected(youngest)


def test_nobody_is_admitted_into_the_pages_that_running_ones_grow_into():
    bench = Bench(usable_pages=5)
    bench.submit(4, 8)
    bench.submit(4, 8)
    third = bench.submit(4, 1)  # fits into the fifth page, which one of the others needs next
    bench.turn()
    assert third not in bench.running


def preempt_with_a_token_in_flight(bench: Bench, raising: bool = False) -> None:
    """Stops right after the plan that preempts (and whose submit may raise); the step before it is in flight."""
    last = 6  # tokens of the first page's rest and of the second page
    for step in range(1, last + 1):
        bench.launch()
        assert not bench.preemptions, step
        if len(bench.in_flight) == 2:
            bench.land()
    if raising:
        bench.runner.fail(at="submit")
    bench.launch()
    assert bench.preemptions == 1 and len(bench.in_flight) == (1 if raising else 2)


def test_a_token_in_flight_of_a_preempted_request_is_awaited_and_kept():
    bench = Bench(usable_pages=4, depth=2)
    bench.submit(3, 10)
    victim = bench.submit(3, 10)
    preempt_with_a_token_in_flight(bench)
    assert victim not in bench.running
    assert [row.request for row in bench.in_flight[0][0].rows] == [1, victim]
    had = len(bench.answers[victim])
    bench.land()
    assert bench.answers[victim] == bench.expected(victim)[: had + 1]
    bench.run()
    assert bench.answers[victim] == bench.expected(victim)


def test_a_preempted_request_may_end_by_the_token_that_was_in_flight():
    bench = Bench(usable_pages=4, depth=2)
    bench.submit(3, 10)
    prompt = b"xyz"
    victim = bench.submit(prompt, 10, stop_token_ids=(oracle(prompt, 6)[-1],))
    preempt_with_a_token_in_flight(bench)
    (delta,) = [delta for delta in bench.land() if delta.request == victim]
    assert delta.finish == Finish("stop", "stop_token")
    bench.run()
    assert bench.answers[victim] == bench.expected(victim)
    assert len(bench.runner.steps[-1].rows) == 1, "it was never computed again"


def test_a_preempted_request_is_not_resumed_before_its_token_in_flight_is_there():
    bench = Bench(usable_pages=4, depth=2)
    bench.submit(3, 10)
    victim = bench.submit(3, 10)
    preempt_with_a_token_in_flight(bench, raising=True)  # the step that preempts never runs, its pages are back
    assert victim in bench.waiting and bench.pool.available == bench.pool.capacity
    assert bench.launch() is None
    bench.land()
    bench.run()
    assert bench.answers[victim] == bench.expected(victim)


@pytest.mark.parametrize("usable_pages", range(5, 24))
@both_depths
def test_many_long_requests_in_a_small_pool_all_end_and_a_resumed_one_is_left_alone_for_a_page(usable_pages, depth):
    bench = Bench(usable_pages=usable_pages, depth=depth, budget=16, page_size=4)
    ids = [bench.submit(2 + id, 16 - id) for id in range(8)]
    admitted: dict[int, int] = {}
    before: list[int] = []
    while bench.scheduler.has_work:
        oldest = bench.scheduler.unfinished[0]
        bench.turn()
        number = len(bench.runner.steps)
        now = bench.running
        admitted |= {id: number for id in now if id not in before}
        for id in before:
            if id not in now and id not in bench.finishes:
                assert id != oldest and number - admitted[id] > bench.pool.page_size - depth
        before = now
        assert number < sum(16 * 3 for _ in ids)
    bench.run()
    assert [bench.answers[id] for id in ids] == [bench.expected(id) for id in ids]


# one step in flight


def test_with_one_step_in_flight_the_next_row_carries_a_placeholder():
    bench = Bench(depth=2)
    bench.submit(5, 4)
    first, second = bench.launch(), bench.launch()
    assert first is not None and not first.rows[0].pending
    assert second is not None and second.rows[0].pending
    assert shape(second) == [(1, 5, 1, True)]


def test_nothing_is_planned_past_the_last_token_that_may_come():
    bench = Bench(depth=2)
    bench.submit(5, 1)
    assert bench.launch() is not None
    assert bench.launch() is None
    bench.land()
    assert not bench.scheduler.has_work


def test_what_was_computed_behind_a_stop_token_is_dropped():
    bench = Bench(depth=2)
    first = oracle(b"hello", 1)[0]
    id = bench.submit(b"hello", 10, stop_token_ids=(first,))
    bench.launch()
    bench.launch()
    assert bench.land()[0].finish == Finish("stop", "stop_token")
    assert bench.land() == []
    assert bench.answers[id] == [first]


def test_pages_of_an_aborted_request_may_be_handed_on_while_its_step_is_in_flight():
    bench = Bench(usable_pages=3, depth=2)
    first = bench.submit(9, 2)
    bench.launch()
    bench.abort(first)
    second = bench.submit(9, 3)
    bench.run()
    assert bench.answers[second] == bench.expected(second)


# aborts and faults


@both_depths
@pytest.mark.parametrize("turns", range(6))
def test_an_abort_gives_every_page_back_whatever_the_request_was_doing(turns, depth):
    bench = Bench(budget=8, depth=depth)
    id = bench.submit(20, 4)
    for _ in range(turns):
        bench.turn()
    if depth == 2:
        bench.launch()
    (delta,) = bench.abort(id)
    assert delta.finish == Finish("cancelled", "client")
    assert bench.pool.available == bench.pool.capacity and not bench.scheduler.has_work
    assert bench.abort(id) == []
    bench.run()
    assert bench.answers[id] == bench.expected(id)[: len(bench.answers[id])]


def test_an_abort_in_the_queue_lets_the_next_one_move_up():
    bench = Bench(max_num_seqs=1)
    ids = [bench.submit(3, 2) for _ in range(3)]
    bench.turn()
    bench.abort(ids[1])
    bench.run()
    assert bench.answers[ids[1]] == [] and bench.answers[ids[2]] == bench.expected(ids[2])


def test_aborting_a_preempted_request_with_a_token_in_flight_leaves_nothing_behind():
    bench = Bench(usable_pages=4, depth=2)
    bench.submit(3, 10)
    victim = bench.submit(3, 10)
    preempt_with_a_token_in_flight(bench)
    bench.abort(victim)
    bench.run()
    assert bench.answers[1] == bench.expected(1)


@both_depths
def test_a_step_that_raises_ends_its_own_requests_and_no_other(depth):
    bench = Bench(depth=depth, max_num_seqs=1)
    first, second = bench.submit(3, 4), bench.submit(3, 4)
    bench.runner.fail()
    (delta,) = bench.turn()
    assert (delta.request, delta.finish) == (first, Finish("error", "engine_error", "kernel panic"))
    bench.run()
    assert bench.answers[second] == bench.expected(second)


def test_a_result_for_another_step_is_our_bug():
    bench = Bench()
    bench.submit(3)
    step = bench.scheduler.plan(0.0)
    assert step is not None
    with pytest.raises(AssertionError, match="was answered by"):
        bench.scheduler.commit(step, StepResult(number=step.number + 1, tokens=((1,),), seconds=0.0))


def test_statistics_count_requests_tokens_and_ends():
    bench = Bench(max_num_seqs=2)
    bench.submit(3, 2)
    bench.submit(5, 3)
    bench.abort(bench.submit(2, 2))
    bench.run()
    statistics = bench.scheduler.statistics()
    assert statistics == {
        "running": 0,
        "waiting": 0,
        "waiting_preempted": 0,
        "waiting_tenants": 0,
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "steps": 3,
        "preemptions": 0,
        "prompt_tokens": 8,
        "generated_tokens": 5,
        "finished_stop": 0,
        "finished_length": 2,
        "finished_cancelled": 1,
        "finished_error": 0,
        "kv_pages": 64,
        "kv_pages_used": 0,
    }
