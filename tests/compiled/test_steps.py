"""What the parts of a step do, on a tiny model: drafts, page copies, log-probabilities, poison."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled.runner import LocalRunner, RunnerOptions, build_runner
from compiled.step import Row, Sampling, Step
from tests.compiled import tiny

PROMPT = (3, 5, 7, 11, 13, 17, 19, 23, 29)
ANSWER = 12
PAGES = (9, 4, 7, 2, 8, 3)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=-3),
    Sampling(temperature=1.3, typical_p=0.8, min_p=0.01, logit_bias=((4, 2.0),), seed=1),
]


@pytest.fixture(scope="module", params=["cpu", "recording"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalRunner:
    folder = tiny.make(tmp_path_factory.mktemp("model"), "llama")
    options: dict[str, Any] = {"dtype": "float32", "page_size": 4, "kv_pages": 40, "eager": True, "max_num_seqs": 8}
    return build_runner(RunnerOptions(model=str(folder), device=request.param, **options), lambda *_: None)


def generate(runner: LocalRunner, sampling: Sampling, guess: Callable[[list[int]], list[int]]) -> tuple[list[int], int]:
    """The answer to `PROMPT`, where each step also computes the guesses, and how many of these were right."""
    known, computed, right = list(PROMPT), 0, 0
    while len(known) < len(PROMPT) + ANSWER:
        drafts = guess(known)
        tokens = (*known[computed:], *drafts)
        history = (*known, *drafts) if sampling.needs_history else ()
        row = Row(0, tokens, computed, PAGES, sampling, False, len(drafts), history, len(PROMPT))
        sampled = runner.submit(Step(0, (row,))).wait().tokens[0]
        assert len(sampled) == 1 + len(drafts)
        agreed = next((i for i, draft in enumerate(drafts) if sampled[i] != draft), len(drafts))
        computed = len(known) + agreed
        known += sampled[: agreed + 1]
        right += agreed
    return known[len(PROMPT) :][:ANSWER], right


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=1.0, presence_penalty=0.6, seed=9)], ids=str)
def test_right_and_wrong_drafts_give_the_tokens_of_an_answer_without_drafts(
    sampling: Sampling, runner: LocalRunner
) -> None:
    plain, _ = generate(runner, sampling, lambda known: [])
    truth = [*PROMPT, *plain, *[0] * 9]
    assert generate(runner, sampling, lambda known: truth[len(known) : len(known) + 4])[0] == plain
    tokens, right = generate(runner, sampling, lambda known: [*truth[len(known) : len(known) + 2], 1, 1])
    assert tokens == plain
    assert right >= ANSWER // 2, "two of three tokens come from drafts"
    assert generate(runner, sampling, lambda known: [0, 1, 2]) == (plain, 0) or 0 in plain


def test_drafts_of_one_row_leave_its_batch_mates_alone(runner: LocalRunner) -> None:
    rows = [Row(i, PROMPT[: 3 + i], 0, (1 + 3 * i, 2 + 3 * i), s) for i, s in enumerate(SAMPLINGS)]
    alone = [runner.submit(Step(0, (row,))).wait().tokens[0] for row in rows]
    rows[1] = dataclasses.replace(rows[1], tokens=(*rows[1].tokens, 8, 9), drafts=2)
    together = runner.submit(Step(0, tuple(rows))).wait().tokens
    assert [tokens[:1] for tokens in together] == alone
    assert [len(tokens) for tokens in together] == [1, 3, 1, 1]


def test_a_fork_goes_on_from_copied_and_shared_pages_as_if_it_were_alone(runner: LocalRunner) -> None:
    runner.poison(range(1, 40))
    runner.submit(Step(0, (Row(0, PROMPT[:6], 0, (5, 6)),)))
    # Page 6 holds two of four positions. The fork writes to its copy in the same step as the first to the original.
    first = Row(0, PROMPT[6:], 6, (5, 6, 7), Sampling())
    fork = Row(1, (41, 43), 6, (5, 11), Sampling())
    got = runner.logits(Step(1, (first, fork), copies=((6, 10), (10, 11))))
    alone = [
        runner.logits(Step(2, (Row(2, t, 0, (20, 21, 22), Sampling()),)))[0] for t in (PROMPT, (*PROMPT[:6], 41, 43))
    ]
    torch.testing.assert_close(got, torch.stack(alone), rtol=1e-5, atol=1e-5)


def test_logprobs_and_scores_are_those_of_the_raw_logits(runner: LocalRunner) -> None:
    drawing = Sampling(temperature=5.0, seed=3, logit_bias=((1, 9.0),), logprobs=2)
    rows = (
        Row(0, PROMPT, 0, (1, 2, 3), Sampling(), targets=PROMPT[1:], targets_top=3),
        Row(1, (*PROMPT[:4], 8), 0, (4, 5), drawing, drafts=1),
        Row(2, PROMPT[:3], 0, (6,), targets=PROMPT[1:4]),
    )
    logits = runner.logits(Step(0, rows)).log_softmax(dim=-1)
    result = runner.submit(Step(0, rows)).wait()
    assert [len(of_row) for of_row in result.logprobs] == [0, 2, 0]
    assert [len(of_row) for of_row in result.scores] == [8, 0, 3]
    assert [found.token for found in result.logprobs[1]] == list(result.tokens[1])
    assert [found.token for found in (*result.scores[0], *result.scores[2])] == [*PROMPT[1:], *PROMPT[1:4]]
    for row, found in enumerate([*result.logprobs[1], *result.scores[0], *result.scores[2]], start=1):
        assert found.logprob == pytest.approx(float(logits[row, found.token]), abs=1e-5)
        assert found.rank == 1 + int((logits[row] > logits[row, found.token]).sum())
        best = logits[row].topk(len(found.top))
        assert [token for token, _ in found.top] == best.indices.tolist()
    assert [len(found.top) for found in result.logprobs[1]] == [2, 2]
    assert {len(found.top) for found in result.scores[0]} == {3}


def test_a_step_that_asks_for_no_logprobs_carries_none(runner: LocalRunner) -> None:
    result = runner.submit(Step(0, (Row(0, PROMPT, 0, (1, 2, 3), Sampling()),))).wait()
    assert (result.logprobs, result.scores) == ((), ())


def test_poison_in_freed_pages_never_reaches_a_token(runner: LocalRunner) -> None:
    expected, _ = generate(runner, SAMPLINGS[1], lambda known: [])
    runner.poison(range(1, 40))
    assert generate(runner, SAMPLINGS[1], lambda known: [])[0] == expected
    assert runner.statistics()["broken_rows"] == 0


def test_a_read_of_a_poisoned_page_is_seen_and_does_not_hurt_the_batch_mates(
    runner: LocalRunner, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [Row(0, PROMPT[:4], 0, (1,), Sampling()), Row(1, PROMPT[4:6], 4, (2, 3), Sampling())]
    alone = runner.submit(Step(0, (rows[0],))).wait().tokens[0]
    before = runner.statistics()["broken_rows"]
    runner.poison([2])
    result = runner.submit(Step(5, tuple(rows))).wait()
    assert result.tokens[0] == alone
    assert result.tokens[1] == (0,), "the lowest id, where no logit says anything"
    assert runner.statistics()["broken_rows"] == before + 1
    assert "step 5: 1 rows of the model's logits hold NaN" in caplog.text
