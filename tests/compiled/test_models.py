"""Architectures that transformers knows run in pages, compiled, and equal transformers' own eager run."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled.runner import LocalRunner, RunnerOptions, build_runner
from compiled.step import PADDING_PAGE, Row, Sampling, Step
from tests.compiled import tiny

SUPPORTED = ["llama", "qwen3", "mistral", "gpt_neox"]
PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23, 29], [31, 37], [41, 43, 47, 53, 59]]


def build(folder: Path, **changes: object) -> LocalRunner:
    options = {"dtype": "float32", "page_size": 4, "kv_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return build_runner(RunnerOptions(model=str(folder), **(options | changes)), lambda *_: None)  # type: ignore[arg-type]


def expected(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_logits_in_pages_equal_the_eager_model(kind: str, eager: bool, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, kind)
    runner = build(folder, eager=eager)
    pages = [(7, 2, 9), (4,), (11, 5)]
    # A whole prompt beside the first chunk of another, then its last token beside a third prompt.
    first = Step(0, (Row(1, tuple(PROMPTS[1]), 0, pages[1], Sampling()), Row(0, tuple(PROMPTS[0][:6]), 0, pages[0])))
    second = Step(
        1,
        (
            Row(0, tuple(PROMPTS[0][6:]), 6, pages[0], Sampling()),
            Row(2, tuple(PROMPTS[2]), 0, pages[2], Sampling()),
        ),
    )
    got = torch.cat([runner.logits(first), runner.logits(second)])
    want = torch.stack([expected(folder, PROMPTS[i]) for i in (1, 0, 2)])
    assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_prompt_in_chunks_of_1_to_17_tokens_has_the_logits_of_the_whole(kind: str, tmp_path: Path) -> None:
    changes = {"sliding_window": 9} if kind == "mistral" else {}
    runner = build(tiny.make(tmp_path, kind, **changes), eager=True, max_num_batched_tokens=64)
    prompt, pages = tuple(range(3, 37)), tuple(range(1, 10))
    whole = runner.logits(Step(0, (Row(0, prompt, 0, pages, Sampling()),)))
    for chunk in range(1, 18):
        for start in range(0, len(prompt), chunk):
            last = start + chunk >= len(prompt)
            row = Row(0, prompt[start : start + chunk], start, pages, Sampling() if last else None)
            logits = runner.logits(Step(0, (row,)))
        assert torch.allclose(logits, whole, atol=1e-5), chunk


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("gemma2", {"sliding_window": 6}),
        ("llama", {"head_dim": 12}),
    ],
    ids=["windows", "soft caps", "head size"],
)
def test_layers_that_attend_in_unlike_ways_each_get_their_own(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny.make(tmp_path, kind, **changes)
    runner = build(folder, eager=True, attention="cpu")
    assert runner.kv.window is None
    got = runner.logits(Step(0, (Row(0, tuple(PROMPTS[0]), 0, (1, 2, 3), Sampling()),)))
    assert torch.allclose(got[0], expected(folder, PROMPTS[0]), atol=1e-4)


def test_a_sliding_window_beyond_the_context_changes_nothing_and_is_served(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "mistral", sliding_window=128)
    runner = build(folder, eager=True, max_model_len=128)
    got = runner.logits(Step(0, (Row(0, tuple(PROMPTS[0]), 0, (1, 2, 3), Sampling()),)))
    assert runner.kv.window is None
    assert torch.allclose(got[0], expected(folder, PROMPTS[0]), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"eager": True}, {"eager": True, "attention": "cpu"}], ids=str)
def test_a_window_shorter_than_the_context_equals_the_eager_model_without_reading_what_left_it(
    options: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny.make(tmp_path, "mistral", sliding_window=9)
    runner = build(folder, **options)
    assert runner.kv.window == 9
    prompt = [3 + 7 * i % 90 for i in range(40)]
    pages = [1 + i for i in range(10)]
    for start, end in [(0, 20), (20, 23), (23, 39), (39, 40)]:
        gone = max(0, start + 1 - 9) // 4
        runner.poison(pages[:gone])
        table = (PADDING_PAGE,) * gone + tuple(pages[gone:])
        got = runner.logits(Step(0, (Row(0, tuple(prompt[start:end]), start, table, Sampling()),)))
        assert torch.allclose(got[0], expected(folder, prompt[:end]), atol=1e-4), end


def test_padding_ids_of_the_head_are_never_sampled(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}')
    runner = build(folder, eager=True)
    assert runner.model.vocab_size == 3
    assert runner.model.eos_token_ids == (2,)
    assert runner.logits(Step(0, (Row(0, (1, 2), 0, (1,), Sampling()),))).shape == (1, 3)


def test_an_end_outside_of_the_vocabulary_is_none(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 100000]}')
    assert build(folder, eager=True).model.eos_token_ids == (2,)


def test_the_ledger_says_where_the_memory_went(tmp_path: Path) -> None:
    runner = build(tiny.make(tmp_path, "llama"), eager=True)
    ledger = runner.statistics()
    assert ledger["kv_bytes"] == 40 * 2 * 2 * 4 * 2 * 16 * 4
    assert ledger["weights_bytes"] > 0
    assert ledger["step_bytes"] >= 0
