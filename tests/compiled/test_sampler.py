"""Which token is drawn, and what its draw depends on."""

import pytest
import torch

from compiled.sampler import probabilities, sample, uniform
from compiled.step import Sampling


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_greedy_takes_the_highest_logit_whatever_the_other_rows_do() -> None:
    rows = logits([0.0, 3.0, 1.0], [5.0, 3.0, 1.0])
    tokens = sample(rows, [Sampling(), Sampling(temperature=1.0, seed=3)], torch.tensor([4, 9]))
    assert tokens[0] == 1


@pytest.mark.parametrize("position", range(50))
def test_top_k_of_one_is_greedy(position: int) -> None:
    rows = torch.randn(1, 100, generator=torch.Generator().manual_seed(position))
    tokens = sample(rows, [Sampling(temperature=1.5, top_k=1, seed=1)], torch.tensor([position]))
    assert tokens.tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0), 4),
        (Sampling(temperature=1.0, top_k=3), 3),
        (Sampling(temperature=1.0, top_k=400), 4),
        (Sampling(temperature=1.0, top_p=0.79), 2),
        (Sampling(temperature=1.0, top_p=0.81), 3),
        (Sampling(temperature=1.0, top_p=1e-9), 1),
        (Sampling(temperature=1.0, min_p=0.5), 2),
        (Sampling(temperature=1.0, min_p=1.0), 1),
        (Sampling(temperature=1.0, top_k=3, top_p=0.8), 2),
    ],
)
def test_truncation_keeps_the_likeliest_tokens(sampling: Sampling, kept: int) -> None:
    rows = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()[:, [2, 0, 3, 1]]
    probs = probabilities(rows, [sampling])
    assert int((probs > 0).sum()) == kept
    assert probs[0, 1] > 0


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    rows = torch.randn(32, 500, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(temperature=0.5 + i / 10, top_k=i * 10, top_p=1 - i / 100, seed=i) for i in range(32)]
    positions = torch.arange(100, 132)
    together = sample(rows, samplings, positions)
    for i in range(32):
        alone = sample(rows[i : i + 1], samplings[i : i + 1], positions[i : i + 1])
        assert alone.tolist() == [together[i]]


def test_draws_follow_the_distribution() -> None:
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    tokens = sample(wanted.log().expand(n, 4), [Sampling(temperature=1.0, seed=11)] * n, torch.arange(n))
    seen = torch.bincount(tokens, minlength=4) / n
    assert torch.allclose(seen, wanted, atol=0.012)


def test_a_token_without_mass_is_never_drawn() -> None:
    rows = torch.full((1000, 50), -torch.inf)
    rows[:, 20:22] = 0.0
    tokens = sample(rows, [Sampling(temperature=1.0, seed=5)] * 1000, torch.arange(1000))
    assert set(tokens.tolist()) == {20, 21}


def test_temperature_near_zero_does_not_overflow() -> None:
    tokens = sample(logits([80.0, -80.0, 79.0]), [Sampling(temperature=1e-5, seed=1)], torch.tensor([1]))
    assert tokens.tolist() == [0]


def test_the_random_number_is_philox() -> None:
    # Random123's known answer for a zero counter and a zero key begins with these two words.
    first, second = 0x6627E8D5, 0xE169C58D
    expected = (((first >> 5) << 26) | (second >> 6)) / 2**53
    assert uniform(torch.tensor([0]), torch.tensor([0])).tolist() == [expected]


def test_random_numbers_differ_by_seed_and_by_position_and_stay_below_one() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]).repeat_interleave(200)
    positions = torch.arange(200).repeat(5)
    numbers = uniform(seeds, positions)
    assert len(set(numbers.tolist())) == 1000
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
