"""Each causal architecture of the installed transformers equals its own eager run, or is refused with the reason.

What comes out is written to ``docs/models.md``.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.fx import GraphModule
from transformers.modeling_utils import PreTrainedModel

from compiled.attention.base import AttentionSpec
from compiled.inductor import Call
from compiled.pieces import Compiled
from compiled.probe import probe
from compiled.runner import LocalRunner, RunnerOptions, build_runner
from compiled.split import Split
from compiled.step import LoadError, Row, Sampling, Step
from tests.compiled import architectures, caches

TABLE = Path(__file__).parent.parent.parent / "docs" / "models.md"
KINDS = architectures.causal_types()
REQUIRED = {
    *("llama", "llama4_text", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2"),
    *("gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "granite", "granitemoe", "smollm3", "gpt_neox"),
    *("gpt2", "opt", "starcoder2", "cohere2", "glm4", "exaone4", "seed_oss", "gpt_oss", "deepseek_v3"),
}
NO_GRAPH = {"ctrl", "dbrx", "jetmoe", "longcat_flash"}
"""Served with ``--eager`` only: their code looks at numbers on its way."""

LENGTH = 20
TOKENS = tuple(3 + 7 * i % 90 for i in range(LENGTH))
STEPS = ((0, 7), (7, 18), (18, 19), (19, 20))
PAGES, OTHER_PAGES = (7, 2, 30, 11, 5), (4, 9)
TOLERANCE = 1e-4
"""Of the largest logit."""


@dataclass(frozen=True)
class Verdict:
    """``needs`` describes the attention of an architecture that is equal; ``refusal`` is the reason of another."""

    needs: str = ""
    refusal: str = ""


def options(folder: Path, **changes: Any) -> RunnerOptions:
    """Those of a small runner, of which nothing is compiled unless ``changes`` say so."""
    small = {"page_size": 4, "kv_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    return RunnerOptions(model=str(folder), **({"dtype": "float32", "eager": True} | small | changes))  # type: ignore[arg-type]


def write(kind: str, folder: Path, **changes: Any) -> PreTrainedModel | None:
    """A tiny checkpoint of ``kind`` and the model itself; None where a package that it needs is missing."""
    try:
        model = architectures.build(kind, **changes)
        model.save_pretrained(folder)
    except ImportError:
        model = None
        (folder / "model.safetensors").touch()
    architectures.shrink(kind, **changes).save_pretrained(folder)  # the whole of a config of which the model has a part
    return model


def error_of(runner: LocalRunner, model: PreTrainedModel, tokens: tuple[int, ...] = TOKENS) -> float:
    """The largest difference of a logit from the eager model's, as a share of the largest logit.

    The eager model sees the whole at once. The runner sees chunks and a single token beside somebody else's chunk, and
    a token that is all of its step: a size that no trace has seen.
    """
    got = []
    mate = Row(1, tokens[4:9], 0, OTHER_PAGES)
    for start, end in STEPS[:-1]:
        row = Row(0, tokens[start:end], start, PAGES, Sampling(), targets=tokens[start:end])
        got.append(runner.logits(Step(0, (mate, row)))[1:])  # without the sampled row, which repeats the last
    start, end = STEPS[-1]
    got.append(runner.logits(Step(0, (Row(0, tokens[start:end], start, PAGES, targets=tokens[start:end]),))))
    with torch.no_grad():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0, :, : runner.model.vocab_size]
    return float((torch.cat(got) - want).abs().max() / want.abs().max())


def describe(layers: Sequence[AttentionSpec]) -> str:
    """What these layers ask of attention beyond softmax over all that came before."""
    windows = {layer.window for layer in layers}
    asked = {
        "windows": None not in windows,
        "windows in some layers": len(windows) > 1 and None in windows,
        "soft cap": any(layer.soft_cap for layer in layers),
        "sinks": all(layer.sinks for layer in layers),
        "sinks in some layers": len({layer.sinks for layer in layers}) > 1,
        "keys and values of different sizes": any(layer.value_dim for layer in layers),
        "heads that differ by layer": len({(x.num_heads, x.num_kv_heads, x.head_dim, x.value_dim) for x in layers}) > 1,
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)


def judge(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    layers: list[AttentionSpec] = []

    def noted(*arguments: Any) -> tuple[AttentionSpec, ...]:
        layers.extend(found := probe(*arguments))
        return found

    monkeypatch.setattr("compiled.model.probe", noted)
    model = write(kind, folder)
    try:
        runner = build_runner(options(folder), lambda *_: None)
    except LoadError as error:
        return Verdict(refusal=" ".join(str(error).replace(str(folder), "its folder").split()))
    assert model is not None
    assert error_of(runner, model) < TOLERANCE
    return Verdict(needs=describe(layers))


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Verdict]]:
    found: dict[str, Verdict] = {}
    yield found
    if len(found) == len(KINDS):  # a run of a part of the tests says nothing about the rest
        text = render(found)
        is_current = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        TABLE.write_text(text, encoding="utf-8")
        assert is_current, f"{TABLE.name} was out of date and has been written anew"


def render(found: dict[str, Verdict]) -> str:
    equal = sorted(kind for kind, verdict in found.items() if not verdict.refusal)
    refused = sorted(found.keys() - equal)
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}"
    return f"""# Architectures

Written by `tests/compiled/test_architectures.py` with {versions}.

Of the {len(found)} causal types whose attention transformers lets others replace, {len(equal)} are served: a tiny
random model of each gives, in pages and chunks beside somebody else's tokens, the logits of transformers' own eager run
over the whole sequence, within {TOLERANCE:g} of the largest. The other {len(refused)} are refused when they are loaded.
No list decides which: the model's code is run once for its own config, before its weights are read. So a line here is
true of a type's usual config, and a checkpoint may ask for more or for less.

| type | class | asks attention for | |
|---|---|---|---|
{"".join(f"| {kind} | {KINDS[kind]} | {found[kind].needs} | {_eager(kind)} |{chr(10)}" for kind in equal)}
| refused type | class | reason |
|---|---|---|
{"".join(f"| {kind} | {KINDS[kind]} | {found[kind].refusal} |{chr(10)}" for kind in refused)}"""


def _eager(kind: str) -> str:
    return "with `--eager` only" if kind in NO_GRAPH else ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_equals_its_own_eager_run_or_is_refused(
    kind: str, tmp_path: Path, table: dict[str, Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    table[kind] = judge(kind, tmp_path, monkeypatch)
    assert not (kind in REQUIRED and table[kind].refusal)


def served() -> list[str]:
    """The types that the table says are served."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    return re.findall(r"^\| (?!type )(\S+) \| \w+ \|", text.partition("| refused type")[0], re.MULTILINE)


def test_most_architectures_are_served() -> None:
    assert len(served()) >= 90
    assert set(served()) >= REQUIRED


def interpreter(graph: GraphModule) -> Call:
    def call(arguments: list[Any]) -> Sequence[Any]:
        return graph(*arguments)

    return call


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # seconds on an idle machine
@pytest.mark.slow
@pytest.mark.parametrize("kind", served())
def test_an_architecture_is_one_graph_that_falls_into_pieces(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the compiled path but Inductor, in whose place the pieces' graphs are run as they are."""

    def interpreted(parts: Split, *_: Any) -> Compiled:
        functions = {piece.key: interpreter(piece.graph) for piece in parts.unique}
        return Compiled(functions, homebound=functions)

    monkeypatch.setattr("compiled.cold.compile_pieces", interpreted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches.apart(tmp_path / "cache")))
    folder = tmp_path / "model"
    model = write(kind, folder)
    assert model is not None
    if kind in NO_GRAPH:
        with pytest.raises(LoadError, match="needs --eager"):
            build_runner(options(folder, eager=False), lambda *_: None)
    else:
        assert error_of(build_runner(options(folder, eager=False), lambda *_: None), model) < TOLERANCE
