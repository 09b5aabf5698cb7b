"""Whose turn it is: priorities with ageing, tenants, and prompts that leave others their pace."""

from itertools import pairwise

import pytest

from compiled.step import Step
from streamengine.pace import Pace
from tests.scheduling import Bench

both_depths = pytest.mark.parametrize("depth", [1, 2])


def admissions(bench: Bench) -> list[int]:
    """Ids in the order of their first row."""
    return list(dict.fromkeys(row.request for step in bench.runner.steps for row in step.rows))


# priorities


def test_a_higher_priority_is_admitted_first():
    bench = Bench(max_num_seqs=1)
    bench.submit(3, 3)
    bench.turn()
    low, high = bench.submit(3, 3), bench.submit(3, 3, priority=1)
    bench.run()
    assert admissions(bench) == [1, high, low]


@both_depths
def test_a_higher_priority_does_not_wait_behind_a_lower_one_that_runs(depth):
    bench = Bench(max_num_seqs=1, depth=depth)
    low = bench.submit(3, 30)
    for _ in range(6):
        bench.turn()
    high = bench.submit(3, 3, priority=1)
    bench.run()
    assert list(bench.finishes) == [high, low] and bench.preemptions == 1
    assert [bench.answers[id] for id in (low, high)] == [bench.expected(id) for id in (low, high)]


@both_depths
def test_pages_too_are_taken_from_a_lower_priority(depth):
    bench = Bench(usable_pages=8, depth=depth)
    low = [bench.submit(7, 8), bench.submit(7, 8)]
    for _ in range(6):
        bench.turn()
    high = bench.submit(13, 3, priority=1)
    bench.run()
    assert bench.preemptions == 1 and list(bench.finishes) == [low[0], high, low[1]], "from the last in rank alone"
    assert [bench.answers[id] for id in low] == [bench.expected(id) for id in low]


def test_nobody_is_preempted_where_that_would_not_let_the_higher_priority_in():
    bench = Bench(usable_pages=8, max_num_seqs=3)
    bench.submit(17, 8, priority=2)
    bench.submit(3, 5)
    for _ in range(6):
        bench.turn()
    bench.submit(20, 2, priority=1)
    bench.turn()
    assert bench.preemptions == 0
    bench.run()


def test_whoever_has_just_been_resumed_is_left_alone_for_a_page_of_tokens():
    bench = Bench(max_num_seqs=1, page_size=4)
    low = bench.submit(3, 40)
    for turn in range(60):
        if turn % 3 == 0 and turn < 30:
            bench.submit(2, 1, priority=1)
        bench.turn()
    resumed = [step.number for step in bench.runner.steps if any(row.request == low for row in step.rows)]
    runs = [1]
    for before, after in pairwise(resumed):
        runs = [*runs[:-1], runs[-1] + 1] if after == before + 1 else [*runs, 1]
    assert len(runs) > 3 and all(run >= 4 for run in runs)
    bench.run()
    assert bench.answers[low] == bench.expected(low)


def test_a_low_priority_that_has_waited_long_enough_goes_before_a_fresh_high_one():
    """The clock of the bench counts submits, and three of them are worth one priority here."""
    bench = Bench(max_num_seqs=1, ageing_s=3.0)
    bench.submit(3, 2, priority=1)
    low = bench.submit(3, 2)
    for _ in range(6):
        bench.submit(3, 2, priority=1)
    bench.run()
    order = admissions(bench)
    assert 1 < order.index(low) < 5


# tenants


def steps_of_light(load: int) -> int:
    """Steps that five requests of a light tenant take, one after the other, beside a backlog of a heavy one."""
    bench = Bench(max_num_seqs=2, max_queue=200)
    for _ in range(load):
        bench.submit(12, 12, tenant="heavy")
    bench.turn()
    for _ in range(5):
        id = bench.submit(4, 4, tenant="light")
        while id not in bench.finishes:
            bench.turn()
    return len(bench.runner.steps)


def test_a_flood_of_one_tenant_does_not_lengthen_the_wait_of_another():
    """The light tenant waits for one seat at a time, whatever is queued: never more than a tenth longer for 100."""
    assert steps_of_light(100) <= 1.1 * steps_of_light(10)


def test_two_tenants_with_a_backlog_are_served_alike():
    bench = Bench(max_num_seqs=1, max_queue=100)
    for tenant, length in [("short", 4), ("long", 16)]:
        for _ in range(20):
            bench.submit(4, length, tenant=tenant)
    for _ in range(160):
        bench.turn()
    served = {"short": 0, "long": 0}
    for id, answer in bench.answers.items():
        served[bench.requests[id].tenant] += len(answer) * 2 + (4 if answer else 0)
    assert 0.75 < served["short"] / served["long"] < 1.35
    bench.run()


# long prompts


def test_a_long_prompt_takes_no_more_than_the_threshold_and_another_goes_in_beside_it():
    bench = Bench(budget=32, long_prefill_token_threshold=10)
    bench.submit(40, 2)
    bench.submit(25, 2)
    bench.turn()
    assert [len(row.tokens) for row in bench.runner.steps[0].rows] == [10, 10]
    bench.run()


def test_a_prompt_leaves_everybody_behind_it_a_token():
    """A higher priority's prompt goes first, but not at the cost of a whole step for those who decode."""
    bench = Bench(budget=8)
    low = [bench.submit(2, 20), bench.submit(2, 20)]
    bench.turn()
    high = bench.submit(30, 2, priority=1)
    bench.turn()
    bench.turn()
    rows = {row.request: len(row.tokens) for row in bench.runner.steps[-1].rows}
    assert rows == {high: 6, low[0]: 1, low[1]: 1}
    bench.run()


def seconds(step: Step) -> float:
    return 0.010 + 0.001 * sum(len(row.tokens) for row in step.rows)


def test_with_a_target_a_prompt_goes_in_as_fast_as_the_pace_of_the_others_allows():
    bench = Bench(budget=64, pace=Pace(0.040, 64), max_model_len=1000, usable_pages=300)
    bench.runner.seconds = seconds
    bench.submit(4, 60)
    bench.turn()
    long = bench.submit(800, 2)
    while not bench.answers[long]:
        bench.turn()
    chunks = [step for step in bench.runner.steps if any(row.request == long for row in step.rows)]
    assert all(seconds(step) < 0.050 for step in chunks)
    late = [seconds(step) for step in chunks[8:-1]]
    assert late and min(late) > 0.030
    bench.run()


def test_with_a_target_a_prompt_alone_takes_the_whole_budget():
    bench = Bench(budget=64, pace=Pace(0.040, 64))
    bench.submit(100, 2)
    bench.turn()
    assert len(bench.runner.steps[0].rows[0].tokens) == 64
    bench.run()


@both_depths
def test_prompt_logprobs_that_were_told_before_a_preemption_are_not_told_again(depth):
    """Beside another request the prompt goes in by two tokens, later alone by three: the chunks overlap."""
    bench = Bench(max_num_seqs=2, budget=3, depth=depth)
    bench.submit(3, 14, priority=2)
    low = bench.submit(30, 2, prompt_logprobs=0)
    for _ in range(7):
        bench.turn()
    bench.submit(3, 12, priority=1)
    bench.run()
    assert bench.preemptions == 1
    told = [one.token for delta in bench.deltas if delta.request == low for one in delta.prompt_logprobs]
    assert told == list(bench.requests[low].prompt[1:])
