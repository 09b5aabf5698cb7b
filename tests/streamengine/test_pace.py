"""The pace of prompts beside decoding rows, on a machine whose step time is a formula."""

from random import Random
from statistics import mean

import pytest

from streamengine.pace import Pace

TARGET_S = 0.050
BUDGET = 512
LEAST = 16


class Machine:
    """Steps take ``base + row * decode + token * prefill`` seconds, give or take ``noise`` of it."""

    def __init__(self, base=0.010, row=0.0005, token=0.0002, noise=0.0):
        self.base, self.row, self.token, self.noise = base, row, token, noise
        self.random = Random(1)

    def run(self, pace, steps, decode_rows=8, waiting=10**9):
        """Times of ``steps`` in which as much of the prompt goes in as the pace allows."""
        times = []
        for _ in range(steps):
            prefill = min(pace.prefill_budget, waiting) if decode_rows else min(BUDGET, waiting)
            seconds = (self.base + self.row * decode_rows + self.token * prefill) * (
                1 + self.random.uniform(-self.noise, self.noise)
            )
            pace.measured(seconds, decode_rows, prefill)
            times.append(seconds)
        return times


def test_without_a_target_the_chunk_is_the_whole_budget():
    pace = Pace(None, BUDGET)
    Machine(token=1.0).run(pace, 20)
    assert pace.prefill_budget == BUDGET


@pytest.mark.parametrize("token", [0.00008, 0.0002, 0.001])
@pytest.mark.parametrize("base", [0.0, 0.010, 0.030])
def test_steps_with_a_prompt_come_to_take_the_target(base, token):
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine(base=base, token=token)
    times = machine.run(pace, 20)
    assert max(times) < 1.1 * TARGET_S
    if pace.prefill_budget not in (LEAST, BUDGET):
        assert times[-1] == pytest.approx(TARGET_S, rel=0.05)


def test_noise_moves_the_mean_only_a_little():
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine(noise=0.2)
    machine.run(pace, 50)
    assert mean(machine.run(pace, 500)) == pytest.approx(TARGET_S, rel=0.1)


def test_a_machine_that_slows_down_gets_smaller_chunks_within_ten_steps():
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine()
    machine.run(pace, 20)
    before = pace.prefill_budget
    machine.base, machine.row, machine.token = 3 * machine.base, 3 * machine.row, 3 * machine.token
    times = machine.run(pace, 10)
    assert times[-1] < 1.1 * TARGET_S
    assert pace.prefill_budget < before / 3


def test_a_machine_that_speeds_up_gets_larger_chunks_again():
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine(base=0.060)
    machine.run(pace, 10, waiting=0)
    machine.run(pace, 20)
    assert pace.prefill_budget == LEAST
    machine.base = 0.010
    times = machine.run(pace, 40)
    assert times[-1] == pytest.approx(TARGET_S, rel=0.05)


def test_more_decoding_rows_leave_less_for_prompts():
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine()
    few = machine.run(pace, 30, decode_rows=4) and pace.prefill_budget
    times = machine.run(pace, 30, decode_rows=48)
    assert pace.prefill_budget < few
    assert times[-1] == pytest.approx(TARGET_S, rel=0.05)


@pytest.mark.parametrize("base", [0.049, 0.2])
def test_no_prompt_is_starved_however_far_the_target_is(base):
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine(base=base, noise=0.3)
    for _ in range(50):
        machine.run(pace, 1, waiting=0)
        machine.run(pace, 5)
        assert LEAST <= pace.prefill_budget <= BUDGET


def test_the_first_chunk_is_a_small_one_and_short_prompts_make_it_no_guess():
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine()
    assert pace.prefill_budget == LEAST
    machine.run(pace, 1, waiting=3)
    assert pace.prefill_budget <= 2 * LEAST


def test_steps_without_decoding_rows_teach_what_a_token_costs():
    pace, machine = Pace(TARGET_S, BUDGET, LEAST), Machine(token=0.010)
    machine.run(pace, 3, decode_rows=0)
    assert pace.prefill_budget == LEAST


def test_a_budget_below_the_least_chunk_is_kept():
    pace = Pace(TARGET_S, 4, LEAST)
    Machine().run(pace, 20)
    assert pace.prefill_budget == 4


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_clock_that_stands_still_does_no_harm(seconds):
    pace = Pace(TARGET_S, BUDGET, LEAST)
    for decode_rows, prefill in [(1, 0), (1, 10), (0, 10), (0, 0), (1, 10)] * 5:
        pace.measured(seconds, decode_rows, prefill)
    assert pace.prefill_budget == BUDGET
