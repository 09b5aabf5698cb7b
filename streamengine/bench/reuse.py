"""What it saves not to compute things again: prompts with a common beginning, answers that repeat their prompt.

Each is asked of an engine in this process, once with and once without.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from streamengine import compose
from streamengine.config import EngineConfig
from streamengine.engine import Engine, Result
from streamengine.link import Progress
from streamengine.sampling import SamplingParams
from streamengine.tokenizer import load_tokenizer

SHARING = 64
PREFIX = 1024
SUFFIX = 16

DRAFTS = 8
COPIED = 128
PASSAGE = (
    "Item 14: the north pump (serial 8831-K) failed at 06:42 on Tuesday; the valve was replaced by crew B, and the "
    "pressure came back to 3.7 bar within 25 minutes. Item 15: no further action was taken on the south pump.\n"
)

Report = Callable[[Progress], None]
Show = Callable[[str], None]


def measure_prefix(config: EngineConfig, report: Report, show: Show) -> dict[str, Any]:
    """Time to first token of `SHARING` requests at once whose first `PREFIX` tokens are the same."""
    result: dict[str, Any] = {"requests": SHARING, "prefix_tokens": PREFIX, "suffix_tokens": SUFFIX}
    for name, cached in (("without", False), ("with", True)):
        setting = msgspec.structs.replace(config, enable_prefix_caching=cached)
        answers = anyio.run(_in_engine, setting, report, _share_a_prefix)
        times = [answer.timing.ttft_ms or 0.0 for answer in answers]
        found = sum(answer.usage.cached_tokens for answer in answers)
        result[f"{name}_cache"] = {
            "ttft_mean_ms": statistics.mean(times),
            "ttft_p50_ms": statistics.median(times),
            "cached_tokens": found,
        }
        show(
            f"prefix    {name:>7} cache: first token after {statistics.mean(times):9.1f} ms (mean), {found} tokens hit"
        )
    ratio = result["without_cache"]["ttft_mean_ms"] / max(result["with_cache"]["ttft_mean_ms"], 1e-9)
    show(f"prefix    {ratio:.1f} times as soon with the cache")
    return {**result, "ratio": ratio}


async def _share_a_prefix(engine: Engine) -> list[Result]:
    """The first one computes the prefix alone; the others come together."""
    ids = _ids(engine, PREFIX + SHARING * SUFFIX)
    prefix, answers = ids[:PREFIX], []
    await _ask(engine, prefix, SamplingParams(max_tokens=1, temperature=0))

    async def one(number: int) -> None:
        suffix = ids[PREFIX + number * SUFFIX :][:SUFFIX]
        answers.append(await _ask(engine, prefix + suffix, SamplingParams(max_tokens=1, temperature=0)))

    async with anyio.create_task_group() as tasks:
        for number in range(SHARING):
            tasks.start_soon(one, number)
    return answers


def measure_speculation(config: EngineConfig, report: Report, show: Show) -> dict[str, Any]:
    """`COPIED` greedy tokens behind a prompt that says the same thing several times."""
    found = anyio.run(_in_engine, config, report, _copy)
    show(
        f"speculate {found['speedup']:.2f} times as fast, {found['acceptance']:.0%} of {found['drafted']:g} guesses "
        f"right, answers {'equal' if found['equal'] else 'DIFFERENT'}"
    )
    return {"drafts": DRAFTS, "tokens": COPIED, **found}


async def _copy(engine: Engine) -> dict[str, Any]:
    prompt = _ids(engine, 0, PASSAGE * 4)
    tokens, seconds = [], []
    before: dict[str, float] = {}
    for drafts in (0, 0, DRAFTS):  # the first one only fills the prefix cache
        before = await engine.statistics()
        sampling = SamplingParams(max_tokens=COPIED, temperature=0, ignore_eos=True, speculate=drafts)
        started = time.perf_counter()
        tokens.append((await _ask(engine, prompt, sampling)).token_ids)
        seconds.append(time.perf_counter() - started)
    after = await engine.statistics()
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    return {
        "plain_s": seconds[1],
        "speculating_s": seconds[2],
        "speedup": seconds[1] / seconds[2],
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else 0.0,
        "equal": tokens[1] == tokens[2],
    }


def _ids(engine: Engine, count: int, text: str = PASSAGE) -> tuple[int, ...]:
    """At least ``count`` ids of ``text``, over and over."""
    ids = tuple(load_tokenizer(engine.model.folder).encode(text))
    return ids * -(-max(count, 1) // len(ids))


async def _ask(engine: Engine, ids: Sequence[int], sampling: SamplingParams) -> Result:
    return await engine.generate(token_ids=ids, sampling=sampling)


async def _in_engine(config: EngineConfig, report: Report, work: Callable[[Engine], Any]) -> Any:
    async with compose.open_engine(config, process=False, progress=report) as engine:
        return await work(engine)
