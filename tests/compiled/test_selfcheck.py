"""What is compiled says what the uncompiled model says, or is not served; and nothing is compiled while serving."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled import build, native, program, selfcheck
from compiled.artifacts import Cache
from compiled.compilations import Watch
from compiled.recipe import Parameter, Recipe, Run
from compiled.runner import LocalRunner, RunnerOptions, build_runner
from compiled.step import LoadError, Row, Sampling, Step
from tests.compiled import caches, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the model's pieces, so that not every test compiles them."""
    return caches.apart(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def cache_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))


def start(model: Path, **changes: Any) -> LocalRunner:
    options = {"dtype": "float32", "page_size": 4, "kv_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return build_runner(RunnerOptions(model=str(model), **(options | changes)), lambda *_: None)  # type: ignore[arg-type]


def forget(shared: Path) -> None:
    """The recipes, but not the pieces: what follows is a cold start that compiles nothing."""
    store = Cache(shared / "streamengine" / "compiled", 1).store
    for entry in store.entries():
        if entry.manifest["kind"] == "recipe":
            store.remove(entry.name)


def noted(shared: Path) -> list[Any]:
    entries = Cache(shared / "streamengine" / "compiled", 1).store.entries()
    return [entry.manifest["notes"]["check"] for entry in entries if entry.manifest["kind"] == "recipe"]


def test_a_first_start_is_compared_with_the_uncompiled_model_and_says_how_near_it_was(
    model: Path, shared: Path
) -> None:
    forget(shared)
    start(model)
    (check,) = noted(shared)
    assert 0 < check["difference"] < check["tolerance"] / 10
    assert check["tolerance"] == 0.001


def test_in_bfloat16_the_model_itself_says_how_much_rounding_does(model: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    expected = selfcheck.expect(module, dict(module.named_parameters()), tiny.VOCABULARY)
    assert expected.logits_TV.dtype == torch.float32

    def run(step: Step, wrong: float = 0.0) -> torch.Tensor:
        end = step.rows[0].start + len(step.rows[0].tokens)
        with torch.no_grad():
            logits_TV = module(torch.tensor([expected.tokens[:end]])).logits[0, step.rows[0].start :]
        return logits_TV + wrong * torch.randn(logits_TV.shape) * logits_TV.std()

    found = selfcheck.check(expected, 4, run)
    assert 0 < found.difference < found.tolerance < 0.1
    with pytest.raises(LoadError, match="use --eager"):
        selfcheck.check(expected, 4, lambda step: run(step, wrong=0.2))
    with pytest.raises(LoadError, match="differ by nan"):
        selfcheck.check(expected, 4, lambda step: run(step) * torch.nan)


@pytest.mark.parametrize(("names", "layer"), [("q_proj", 0), ("down_proj", 2)])
def test_a_parameter_in_anothers_place_is_not_served_and_not_saved(
    names: str, layer: int, model: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(source: Any) -> Any:
        if isinstance(source, Parameter):
            mine, its = f"layers.{layer}.", "layers.1."
            swapped = tuple(n.replace(mine, its) if mine in n and names in n else n for n in source.names)
            return replace(source, names=swapped)
        return source

    def wrong(recipe: Recipe, *arguments: Any) -> program.Program:
        sources = {name: other(source) for name, source in recipe.sources.items()}
        assert sources != recipe.sources
        return program.bind(replace(recipe, sources=sources), *arguments)

    forget(shared)
    monkeypatch.setattr(build, "bind", wrong)
    with pytest.raises(LoadError, match=r"its logits differ by .* \(median over 12 tokens; largest .* at token"):
        start(model)
    assert noted(shared) == []


def test_a_piece_that_computes_something_else_is_not_served(
    model: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(recipe: Recipe, functions: Any, *rest: Any) -> program.Program:
        last = recipe.calls[-1]
        assert isinstance(last, Run)

        def rolled(arguments: list[Any]) -> Any:
            return tuple(made.roll(1, -1) for made in functions[last.key](arguments))

        return program.bind(recipe, {**functions, last.key: rolled}, *rest)

    forget(shared)
    monkeypatch.setattr(build, "bind", wrong)
    with pytest.raises(LoadError, match="does not compute what the uncompiled one does"):
        start(model)


def test_a_later_start_is_not_checked_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(model)
    monkeypatch.setattr(build, "expect", None)
    start(model)


def test_what_could_not_be_checked_is_said_and_checked_at_the_next_start(
    model: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(shared)
    with monkeypatch.context() as broken:
        broken.setattr(build, "expect", None)
        start(model)
    assert "the compiled model is not checked: TypeError" in caplog.text
    assert noted(shared) == [None]
    start(model)
    assert noted(shared) != [None]


def test_nothing_is_compiled_over_a_mixed_load(model: Path) -> None:
    runner = start(model)
    runner.warmup()
    everything = Sampling(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias=((3, 1.0),), bad_words=((4, 5),), barred_token_ids=(2,), min_tokens=2,
        logprobs=3, seed=1,
    )  # fmt: skip
    few = Sampling(allowed_token_ids=(1, 2, 3), logprobs=0)
    number = 0
    for lengths in [(1,), (1, 1), (2,), (7,), (32,), (29, 1, 1, 1), (1, 3, 5, 2)]:
        for sampling in (Sampling(), Sampling(temperature=1.0), everything, few, None):
            rows = [
                Row(
                    i, tuple(range(3, 3 + length)), 0, tuple(range(1 + 9 * i, 10 + 9 * i)), sampling,
                    drafts=min(length - 1, 1) if sampling else 0, history=tuple(range(3, 3 + length)),
                    prompt_length=1, targets=tuple(range(4, 4 + length)), targets_top=i,
                )
                for i, length in enumerate(lengths)
            ]  # fmt: skip
            runner.submit(Step(number, tuple(rows), copies=((1, 2), (10, 11)) if number % 2 else ()))
            number += 1
    assert runner.statistics()["compilations_after_ready"] == 0


def test_a_compile_after_ready_is_counted_and_named(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = start(model)
    runner.warmup()
    step = Step(7, (Row(0, (3,), 0, (1,), Sampling()),))
    (tmp_path / "late.cpp").write_text('extern "C" int late() { return 1; }')
    native.load_library([tmp_path / "late.cpp"], tmp_path)
    runner.submit(step)
    runner.submit(step)
    assert runner.statistics()["compilations_after_ready"] == 1
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.getMessage().startswith("step 7: something was compiled while serving: late-")


def test_what_dynamo_traces_is_seen_with_the_functions_name() -> None:
    watch = Watch()

    def traced_here(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    torch.compile(traced_here, backend="eager")(torch.ones(2))
    (line,) = watch.look()
    assert line.startswith("Dynamo traced, ")
    assert "traced_here of " in line
    assert watch.look() == []
