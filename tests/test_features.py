"""Every pair of features: the answer is the one that the plainest engine gives, or the pair is refused by name.

The truth is asked of an uncompiled engine with reference attention and no cache, one request at a time, with
those features only that are meant to change an answer. What comes out is written to ``docs/features.md``.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest

from streamengine import EngineConfig, SamplingParams, open_engine
from streamengine.config import TransferConfig
from streamengine.engine import Engine
from streamengine.errors import RequestError

TABLE = Path(__file__).parent.parent / "docs" / "features.md"
PROMPT = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 11, 12, 13)
MATES = ((21, 22, 23), tuple(range(30, 60)), (5, 6, 7, 8, 9, 5, 6, 7, 77), (80, 81), (90, 91, 92, 93))
ANSWER_TOKENS = 12
WORDS = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "array", "items": {"enum": ["ab", "cd", "ce"]}, "minItems": 1}},
}
PATIENCE_S = 300

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Feature:
    """``config`` and ``asked`` (of the engine and of a request) switch it on; ``answer`` says that it is meant to
    change the answer."""

    config: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    answer: bool = False


FEATURES = {
    "compiled pieces": Feature(config={"eager": False}),
    "a step in flight, graphs": Feature(config={"eager": False, "device": "recording"}),
    "chunked prefill": Feature(config={"max_num_batched_tokens": 8, "max_num_seqs": 8}),
    "preemption": Feature(config={"kv_pages": 28}),
    "prefix cache": Feature(config={"enable_prefix_caching": True}),
    "long-prompt threshold": Feature(config={"long_prefill_token_threshold": 3}),
    "paced chunks": Feature(config={"target_itl_ms": 0.1}),
    "debug poisoning": Feature(config={"debug": True}),
    "prefill elsewhere": Feature(config={"prefill_threshold": 6}),
    "seeded sampling": Feature(sampling={"temperature": 0.9, "top_p": 0.95, "seed": 4}, answer=True),
    "top_k, min_p": Feature(sampling={"temperature": 1.2, "top_k": 9, "min_p": 0.01, "seed": 9}, answer=True),
    "typical_p": Feature(sampling={"temperature": 1.1, "typical_p": 0.8, "seed": 2}, answer=True),
    "penalties": Feature(sampling={"presence_penalty": 1.0, "repetition_penalty": 1.3}, answer=True),
    "logit_bias": Feature(sampling={"logit_bias": {31: 3.0, 8: -50.0}}, answer=True),
    "allowed ids": Feature(sampling={"allowed_token_ids": tuple(range(3, 60))}, answer=True),
    "bad words": Feature(sampling={"bad_words": ((5,), (7, 8))}, answer=True),
    "min_tokens, stop ids": Feature(sampling={"min_tokens": 4, "stop_token_ids": tuple(range(10, 97, 3))}, answer=True),
    "logprobs": Feature(sampling={"logprobs": 3}),
    "prompt_logprobs": Feature(sampling={"prompt_logprobs": 1}),
    "n": Feature(sampling={"n": 3}, answer=True),
    "best_of": Feature(sampling={"best_of": 4}, answer=True),
    "beam search": Feature(sampling={"beam_width": 3}, answer=True),
    "speculation": Feature(sampling={"speculate": 4}),
    # The end of a document is the grammar's, so `ignore_eos` has no place there.
    "grammar": Feature(sampling={"ignore_eos": False}, asked={"response_format": WORDS}, answer=True),
    "close_document": Feature(
        sampling={"ignore_eos": False}, asked={"response_format": WORDS, "close_document": True}, answer=True
    ),
    "priority": Feature(asked={"priority": 3}),
    "tenant": Feature(asked={"tenant": "somebody"}),
}
ENGINES = [name for name, feature in FEATURES.items() if feature.config]
REFUSED_TO_CONTINUE = ("n", "best_of", "beam search", "prompt_logprobs")
PAIRS = list(combinations(FEATURES, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tests.compiled import tiny

    folder = tiny.make(tmp_path_factory.mktemp("tiny"), "llama")
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # the latter are how byte-level vocabularies show blanks
    letters.insert(2, "<2>")
    assert len(letters) == tiny.VOCABULARY
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<2>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<2>"}))
    return folder


@asynccontextmanager
async def engine_with(folder: Path, config: dict[str, Any]) -> AsyncIterator[Engine]:
    plain: dict[str, Any] = {
        "eager": True,
        "attention": "cpu",
        "dtype": "float32",
        "threads": 1,
        "page_size": 4,
        "kv_pages": 200,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
    }
    own = {"model": str(folder)} | plain | config
    threshold = own.pop("prefill_threshold", None)
    if threshold is None:
        async with open_engine(EngineConfig(**own), process=False) as engine:
            yield engine
        return
    with TemporaryDirectory() as place:
        address = f"unix:{place}/prefill"
        there = TransferConfig(role="prefill", listen=address)
        here = TransferConfig(role="decode", peers=(address,), prefill_threshold=threshold)
        async with (
            open_engine(EngineConfig(transfer=there, **own), process=False) as other,
            open_engine(EngineConfig(transfer=here, **own), process=False) as engine,
        ):
            await until(engine, "remote_peers", 1)
            yield engine
            assert (await engine.statistics())["remote_landed"] > 0
            for one in (engine, other):
                await until(one, "transfer_pages", 0)


async def until(engine: Engine, name: str, wanted: float) -> None:
    while (await engine.statistics())[name] != wanted:  # noqa: ASYNC110 - nobody tells when a statistic changes
        await anyio.sleep(0.01)


Answers = list[tuple[int, ...]]


async def ask(engine: Engine, *features: str, begun: tuple[int, ...] = ()) -> Answers:
    """All answers to `PROMPT` with ``features``; one that begins so."""
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    asked: dict[str, Any] = {"continues": begun} if begun else {}
    for name in features:
        sampling |= FEATURES[name].sampling
        asked |= FEATURES[name].asked
    result = await engine.generate(token_ids=PROMPT, sampling=SamplingParams(**sampling), **asked)
    if "logprobs" in features:
        assert len(result.logprobs) == len(result.token_ids) - len(begun)
    if "prompt_logprobs" in features:
        assert len(result.prompt_logprobs) == len(PROMPT) - 1
    return [choice.token_ids for choice in result.choices or (result,)]


async def ask_among_others(engine: Engine, *features: str) -> Answers:
    """The same while other requests come, run and go, one of them with the same prompt right before."""

    async def ask_mate(prompt: tuple[int, ...], i: int) -> None:
        sampling = SamplingParams(temperature=i % 2, max_tokens=24 + 5 * i, seed=i)
        await engine.generate(token_ids=prompt, sampling=sampling, priority=i - 1, tenant="other" if i else "")

    await ask_mate(PROMPT, 0)
    async with anyio.create_task_group() as tasks:
        for i, prompt in enumerate(MATES):
            tasks.start_soon(ask_mate, prompt, i)
        answers = await ask(engine, *features)
    return answers  # noqa: RET504 – to mypy a task group may swallow an exception


def told(error: RequestError) -> str:
    return f"refused: {error.message}"


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str], str]]:
    found: dict[tuple[str, str], str] = {}
    yield found
    if len(found) == len(PAIRS):  # a run of a part of the tests says nothing about the rest
        text = render(found)
        is_current = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        TABLE.write_text(text, encoding="utf-8")
        assert is_current, f"{TABLE.name} was out of date and has been written anew"


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, ...], Answers | str]:
    return {}


async def truth(folder: Path, pair: tuple[str, str], known: dict[tuple[str, ...], Answers | str]) -> Answers | str:
    features = tuple(name for name in pair if FEATURES[name].answer)
    if features not in known:
        try:
            async with engine_with(folder, {"attention": "reference"}) as engine:
                known[features] = await ask(engine, *features)
        except RequestError as error:
            known[features] = told(error)
    return known[features]


def engines() -> list[tuple[str, ...]]:
    """Each set of features of the engine that some pair asks for."""
    return [(), *((name,) for name in ENGINES), *combinations(ENGINES, 2)]


@pytest.mark.anyio
@pytest.mark.parametrize("switched_on", engines(), ids=lambda names: " + ".join(names) or "plain")
async def test_no_feature_changes_what_another_gives(
    folder: Path,
    switched_on: tuple[str, ...],
    table: dict[tuple[str, str], str],
    truths: dict[tuple[str, ...], Answers | str],
) -> None:
    pairs = [pair for pair in PAIRS if tuple(name for name in pair if name in ENGINES) == switched_on]
    config: dict[str, Any] = {}
    for name in switched_on:
        config |= FEATURES[name].config
    wrong = []
    with anyio.fail_after(PATIENCE_S):
        async with engine_with(folder, config) as engine:
            for pair in pairs:
                try:
                    answers: Answers | str = await ask_among_others(engine, *pair)
                except* RequestError as errors:
                    answers = told(errors.exceptions[0])  # type: ignore[arg-type]
                expected = await truth(folder, pair, truths)
                if isinstance(answers, str):
                    table[pair] = answers
                else:
                    table[pair] = "works"
                    if answers != expected:
                        wrong.append((pair, answers, expected))
            statistics = await engine.statistics()
    assert not wrong
    assert statistics["kv_pages_used"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("switched_on", [(), ("prefix cache", "a step in flight, graphs")], ids=["plain", "fast"])
async def test_an_answer_that_another_engine_began_goes_on_the_same_with_every_pair(
    folder: Path, switched_on: tuple[str, ...]
) -> None:
    config: dict[str, Any] = {}
    for name in switched_on:
        config |= FEATURES[name].config
    pairs = [pair for pair in PAIRS if not {*pair} & {*ENGINES, *REFUSED_TO_CONTINUE}]
    wrong = []
    with anyio.fail_after(PATIENCE_S):
        async with engine_with(folder, config) as engine:
            for pair in pairs:
                try:
                    (whole,) = await ask(engine, *pair)
                except RequestError:
                    continue
                for cut in {1, len(whole) // 2, len(whole)}:
                    if (again := await ask(engine, *pair, begun=whole[:cut])) != [whole]:
                        wrong.append((pair, cut, again, whole))  # noqa: PERF401 - awaits one at a time
            statistics = await engine.statistics()
    assert not wrong
    assert statistics["kv_pages_used"] == 0


def test_the_pressure_of_a_small_pool_is_real(folder: Path) -> None:
    async def run() -> dict[str, float]:
        async with engine_with(folder, FEATURES["preemption"].config) as engine:
            for _ in range(3):
                await ask_among_others(engine)
            return await engine.statistics()

    assert anyio.run(run)["preemptions"] > 0


def render(found: dict[tuple[str, str], str]) -> str:
    names = list(FEATURES)
    reasons = list(dict.fromkeys(text for text in found.values() if text != "works"))
    lines = [
        "# Which features work together",
        "",
        "Written by `tests/test_features.py`, which runs every pair. ✓: the answer is, token by token, that of an",
        "uncompiled engine with reference attention, no cache and nothing beside it. A letter: refused, see below.",
        "",
        "| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |",
        "|---|" + "---|" * len(names),
    ]
    for i, row in enumerate(names):
        cells = []
        for column in names:
            if row == column:
                cells.append("")
            else:
                text = found.get((row, column)) or found[(column, row)]
                cells.append("✓" if text == "works" else chr(ord("a") + reasons.index(text)))
        lines.append(f"| {i + 1} {row} | " + " | ".join(cells) + " |")
    lines += [
        "",
        *(f"- {chr(ord('a') + i)}: {reason.removeprefix('refused: ')}" for i, reason in enumerate(reasons)),
        "",
    ]
    return "\n".join(lines)


@pytest.mark.anyio
async def test_a_profile_of_an_engine_with_steps_in_flight_changes_no_answer_and_leaves_its_graphs(
    folder: Path,
) -> None:
    profiles = []

    async def profile() -> None:
        profiles.append(await engine.profile(8, plain_steps=2, ceilings=False))

    with anyio.fail_after(PATIENCE_S):
        async with engine_with(folder, FEATURES["a step in flight, graphs"].config) as engine:
            expected = await ask(engine)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(profile)
                await anyio.wait_all_tasks_blocked()
                answers = await ask_among_others(engine)
            replayed = (await engine.statistics())["runner_graph_steps_whole"]
            again = await ask(engine)
            statistics = await engine.statistics()
    (found,) = profiles
    assert answers == expected == again
    assert (found.steps, {call.kind for call in found.calls}) == (8, {"piece", "attention", "host"})
    assert sum(call.total_s for call in found.calls) + found.host.seconds == pytest.approx(found.step_s.total)
    assert found.host.seconds > 0
    assert statistics["runner_graph_steps_whole"] > replayed
