"""Which token is drawn, what its draw depends on, and what is told of it."""

import dataclasses
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled.logprobs import logprobs
from compiled.philox import uniform
from compiled.sampler import sample
from compiled.sampling_batch import prepare
from compiled.step import LOWEST_LOGPROB, Row, Sampling
from tests.compiled.naive_sampler import right_tokens


def rows_of(*samplings: Sampling, history: tuple[int, ...] = (), prompt_length: int = 0) -> list[Row]:
    return [Row(i, (0,), 0, (), s, history=history, prompt_length=prompt_length) for i, s in enumerate(samplings)]


def tokens(logits: torch.Tensor, rows: list[Row], positions: Any) -> list[int]:
    before = logits.clone()
    drawn, _ = sample(logits, prepare(rows, np.array(positions)))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the raw logits are still needed"
    return drawn.tolist()


def draw(logits: list[float], sampling: Sampling, n: int, *history: int, prompt_length: int = 0) -> Counter[int]:
    """How often each token is drawn from these logits with ``n`` seeds."""
    samplings = [dataclasses.replace(sampling, seed=seed) for seed in range(n)]
    rows = rows_of(*samplings, history=history, prompt_length=prompt_length)
    return Counter(tokens(torch.tensor([logits]).expand(n, -1), rows, [len(history)] * n))


def ids(vocabulary: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, vocabulary - 1), max_size=most, unique=True).map(tuple)


@st.composite
def a_row(draw: st.DrawFn, vocabulary: int) -> tuple[Row, int]:
    """A row with any options, and the position that it draws."""

    def option(default: Any, strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(default), strategy))

    history = draw(st.lists(st.integers(0, min(vocabulary, 12) - 1), min_size=1, max_size=12).map(tuple))
    word = st.lists(st.integers(0, min(vocabulary, 12) - 1), min_size=1, max_size=3).map(tuple)
    sampling = Sampling(
        temperature=option(0.0, st.sampled_from([1e-5, 0.31, 1.0, 3.7])),
        top_k=option(0, st.integers(1, 2 * vocabulary)),
        top_p=option(1.0, st.sampled_from([1e-9, 0.1037, 0.5171, 0.9013, 0.9999, 1 - 1e-9])),
        min_p=option(0.0, st.sampled_from([1e-7, 0.0131, 0.3173, 1.0])),
        typical_p=option(1.0, st.sampled_from([1e-9, 0.2037, 0.7071, 0.9519])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        repetition_penalty=option(1.0, st.sampled_from([0.7, 1.3])),
        presence_penalty=option(0.0, st.sampled_from([-1.5, 0.7])),
        frequency_penalty=option(0.0, st.sampled_from([-0.4, 0.9])),
        logit_bias=option((), ids(vocabulary, 3).map(lambda few: tuple((i, 5.0 - 2 * i % 11) for i in few))),
        allowed_token_ids=option((), ids(vocabulary, 9)),
        bad_words=option((), st.lists(word, max_size=4).map(tuple)),
        barred_token_ids=option((), ids(vocabulary, 4)),
        min_tokens=option(0, st.integers(0, 8)),
    )
    prompt_length = draw(st.integers(1, len(history)))
    return Row(0, (0,), 0, (), sampling, history=history, prompt_length=prompt_length), len(history)


@st.composite
def a_step(draw: st.DrawFn) -> tuple[torch.Tensor, list[Row], list[int]]:
    vocabulary = draw(st.sampled_from([2, 13, 255, 256, 300, 1300]))
    rows = draw(st.lists(a_row(vocabulary), min_size=1, max_size=5))
    if vocabulary < 300 and draw(st.booleans()):
        rows = [rows[i % len(rows)] for i in range(21)]  # more than are worked on at once
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(len(rows), vocabulary, generator=source) * draw(st.sampled_from([0.0, 0.3, 2.0, 9.0]))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=source) < 0.4] = -torch.inf
    return logits, [row for row, _ in rows], [position for _, position in rows]


@given(a_step())
def test_every_row_gives_what_the_naive_sampler_gives(step: tuple[torch.Tensor, list[Row], list[int]]) -> None:
    logits, rows, positions = step
    for i, token in enumerate(tokens(logits, rows, positions)):
        assert token in right_tokens(logits[i].tolist(), rows[i], positions[i]), f"row {i}: {rows[i]}"


@given(a_step(), st.randoms(use_true_random=False))
def test_a_row_gives_the_same_token_alone_and_in_any_order(
    step: tuple[torch.Tensor, list[Row], list[int]], shuffle: random.Random
) -> None:
    logits, rows, positions = step
    together = tokens(logits, rows, positions)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    shuffled = tokens(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    for i in range(len(rows)):
        assert tokens(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1]) == together[i : i + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_real_vocabulary_draws_the_same_token_alone_and_in_a_batch_of_32(dtype: torch.dtype) -> None:
    logits = (torch.randn(32, 49_152, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.01},
        {"typical_p": 0.5},
        {"top_p": 0.999, "top_k": 9000},
    ]
    rows = rows_of(*(Sampling(temperature=0.2 + i / 8, seed=i, **options[i % 6]) for i in range(32)))
    positions = list(range(100, 132))
    together = tokens(logits, rows, positions)
    alone = [tokens(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1])[0] for i in range(32)]
    assert together == alone
    assert len(set(together)) > 20


LOG = [math.log(share) for share in (0.15, 0.5, 0.05, 0.3)]


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_k": 400}, {0, 1, 2, 3}),
        ({"top_p": 0.79}, {1, 3}),
        ({"top_p": 0.81}, {0, 1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),
        ({"allowed_token_ids": (0, 2)}, {0, 2}),
        ({"logit_bias": ((2, 100.0),)}, {2}),
        ({"logit_bias": ((1, -100.0), (2, -100.0))}, {0, 3}),
        ({"bad_words": ((1,), (7, 3), (9, 9, 0))}, {0, 2}),
        ({"barred_token_ids": (1, 2), "min_tokens": 3}, {0, 3}),
        ({"barred_token_ids": (1, 2), "min_tokens": 2}, {0, 1, 2, 3}),
        ({"presence_penalty": 100.0}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_each_option_leaves_these_tokens(options: dict[str, Any], drawn: set[int]) -> None:
    # Prompt 8, 9; answer 9, 7: the next token would complete the bad word 7 3, but not 9 9 0.
    assert set(draw([*LOG, *[-100.0] * 6], Sampling(temperature=1.0, **options), 300, 8, 9, 9, 7, prompt_length=2)) == (
        drawn
    )


def test_repetition_counts_prompt_and_answer_and_the_other_penalties_the_answer_only() -> None:
    logits = torch.tensor([[4.0, 4.2, 4.4, -1.0]])
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 2),
        ({"repetition_penalty": 1.2}, 0),  # 1 and 2 are in the history
        ({"presence_penalty": 0.3}, 1),  # only 2 is in the answer
        ({"frequency_penalty": 0.3}, 1),
        ({"frequency_penalty": 0.09}, 1),  # 2 is there three times
        ({"presence_penalty": 0.09}, 2),  # but it counts once
    ]
    for options, token in cases:
        (row,) = rows_of(Sampling(**options), history=(1, 2, 2, 2), prompt_length=1)
        assert tokens(logits, [row], [4]) == [token], options


def test_draws_follow_the_distribution() -> None:
    seen = draw(LOG, Sampling(temperature=1.0), 8_000)
    for token, logit in enumerate(LOG):
        assert seen[token] / 8_000 == pytest.approx(math.exp(logit), abs=0.02)


def test_typical_draws_follow_what_is_nearest_to_the_entropy() -> None:
    # Entropy 1.142 nats; the surprises 1.897, 0.693, 2.996 and 1.204 are off by 0.755, 0.449, 1.854 and 0.062.
    seen = draw(LOG, Sampling(temperature=1.0, typical_p=0.6), 5_000)
    assert set(seen) == {1, 3}
    assert seen[3] / 5_000 == pytest.approx(0.3 / 0.8, abs=0.02)
    assert set(draw(LOG, Sampling(temperature=1.0, typical_p=0.2), 100)) == {3}
    assert set(draw(LOG, Sampling(temperature=1.0, typical_p=0.9), 1000)) == {0, 1, 3}


def test_a_token_without_mass_is_never_drawn() -> None:
    logits = torch.full((1000, 50), -torch.inf)
    logits[:, 20:22] = 0.0
    drawn = tokens(logits, rows_of(*[Sampling(temperature=1.0, seed=5)] * 1000), range(1000))
    assert set(drawn) == {20, 21}


def test_temperature_near_zero_does_not_overflow() -> None:
    assert tokens(torch.tensor([[80.0, -80.0, 79.0]]), rows_of(Sampling(temperature=1e-5, seed=1)), [1]) == [0]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_broken_logits_are_counted_and_never_drawn_and_hurt_no_other_row(temperature: float) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, nan], [1.0, 2.0, 90.0], [nan, nan, nan], [0.0, inf, 0.0], [-inf, -inf, -inf]])
    samplings = [Sampling(temperature=temperature, top_k=1, seed=i) for i in range(5)]
    samplings[2] = dataclasses.replace(samplings[2], allowed_token_ids=(1, 2))
    drawn, broken = sample(logits, prepare(rows_of(*samplings), np.arange(5)))
    assert drawn.tolist() == [1, 2, 1, 1, 0]
    assert broken == 2


def test_where_bars_leave_nothing_they_give_way_but_allowed_ids_hold() -> None:
    options: dict[str, Any] = {"allowed_token_ids": (0, 2), "barred_token_ids": (0, 2), "min_tokens": 1}
    logits = torch.tensor([[1.0, 9.0, 2.0]] * 2)
    rows = rows_of(Sampling(**options), Sampling(temperature=1e-5, **options), history=(1,), prompt_length=1)
    drawn, broken = sample(logits, prepare(rows, np.array([1, 1])))
    assert (drawn.tolist(), broken) == ([2, 2], 0)


def test_ids_beyond_the_sampled_vocabulary_change_no_other_row() -> None:
    options: dict[str, Any] = {"logit_bias": ((3, 50.0), (4, 50.0)), "barred_token_ids": (5, 0), "min_tokens": 9}
    rows = rows_of(Sampling(**options), Sampling(**options), history=(1,), prompt_length=1)
    assert tokens(torch.tensor([[3.0, 2.0, 1.0]] * 2), rows, [1, 1]) == [1, 1]


def test_the_random_number_is_philox() -> None:
    # Random123's known answer for a zero counter and a zero key begins with these two words.
    first, second = 0x6627E8D5, 0xE169C58D
    expected = (((first >> 5) << 26) | (second >> 6)) / 2**53
    assert uniform(np.array([0]), np.array([0])).tolist() == [expected]


def test_random_numbers_differ_by_seed_and_by_position_and_stay_below_one() -> None:
    seeds = np.repeat([0, 1, -1, 2**63 - 1, -(2**63), 2**32], 200)
    positions = np.tile([*range(100), *range(2**32, 2**32 + 100)], 6)
    numbers = uniform(seeds, positions)
    assert len(set(numbers.tolist())) == 1200
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(1200)]
    assert alone == numbers.tolist()


def test_logprobs_are_those_of_the_raw_logits_with_rank_and_the_likeliest() -> None:
    logits = torch.tensor([LOG] * 40)
    found = logprobs(logits, torch.arange(40) % 4, [None, 0, 2, 99] * 10)
    assert found[0] is None
    assert found[37] is not None and found[38] is not None and found[39] is not None
    assert (found[37].token, found[37].rank, found[37].top) == (1, 1, ())
    assert found[37].logprob == pytest.approx(LOG[1], abs=1e-6)
    assert found[38].rank == 4
    assert [token for token, _ in found[38].top] == [1, 3]
    assert dict(found[39].top) == pytest.approx(dict(enumerate(LOG)), abs=1e-6)


def test_a_logprob_is_always_a_finite_number() -> None:
    logits = torch.tensor([[0.0, -math.inf], [math.nan, 0.0], [0.0, math.inf]])
    for found in logprobs(logits, torch.tensor([1, 0, 0]), [2, 2, 2]):
        assert found is not None
        assert found.logprob == LOWEST_LOGPROB
        assert all(LOWEST_LOGPROB <= value <= 0 for _, value in found.top)


# grammar masks


class Bits:
    """Masks that are there."""

    def __init__(self, allowed: list[set[int]], vocabulary: int) -> None:
        self.words = -(-vocabulary // 32)
        self._bits = np.zeros((len(allowed), self.words), np.uint32)
        for row, tokens in enumerate(allowed):
            for token in tokens:
                self._bits[row, token // 32] |= np.uint32(1 << token % 32)

    def wait(self) -> memoryview:
        return self._bits.data.cast("B")


@given(st.data())
def test_a_mask_is_what_allowing_its_tokens_would_be(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([3, 32, 45, 300]))
    some = st.sets(st.integers(0, vocabulary - 1), min_size=1, max_size=40)
    allowed = data.draw(st.lists(st.none() | some, min_size=1, max_size=20))
    samplings = [
        Sampling(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 2.0])), top_k=data.draw(st.sampled_from([0, 2])), seed=i
        )
        for i in range(len(allowed))
    ]
    source = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(allowed), vocabulary, generator=source) * 2
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    broken = data.draw(st.sampled_from([0.0, math.inf, -math.inf, math.nan]))
    if broken != 0:
        logits[torch.rand(logits.shape, generator=source) < 0.2] = broken
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    before = logits.clone()
    at = np.arange(len(allowed))
    listed = rows_of(
        *(
            dataclasses.replace(sampling, allowed_token_ids=tuple(sorted(tokens or ())))
            for sampling, tokens in zip(samplings, allowed, strict=True)
        )
    )
    expected, _ = sample(logits, prepare(listed, at))
    sets = [tokens for tokens in allowed if tokens is not None]
    places = iter(range(len(sets)))
    masks = np.array([-1 if tokens is None else next(places) for tokens in allowed])
    drawn, _ = sample(logits, prepare(rows_of(*samplings), at, masks), Bits(sets, vocabulary) if sets else None)
    assert drawn.tolist() == expected.tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the raw logits are still needed"


def test_a_mask_holds_even_where_nothing_else_is_left_of_a_row() -> None:
    logits = torch.tensor([[5.0, math.nan, -math.inf, -math.inf], [5.0, 4.0, 3.0, 2.0]])
    samplings = (Sampling(), Sampling(allowed_token_ids=(0, 1)))
    drawn, _ = sample(logits, prepare(rows_of(*samplings), np.array([0, 0]), np.array([0, 1])), Bits([{2}, {3}], 4))
    assert drawn.tolist() == [2, 3]
