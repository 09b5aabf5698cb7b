"""Prefill apart from decode, with both engines on this machine: what the handover costs.

It shows no gain and cannot: the two share what one would have alone. What carries over to other machines are bytes per
token and the ratios.
"""

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import anyio
import numpy as np
from msgspec import structs

from streamengine import compose
from streamengine.config import EngineConfig, TransferConfig
from streamengine.engine import Engine, Result
from streamengine.errors import EngineFailure
from streamengine.link import Progress
from streamengine.profile.hardware import usable_cores
from streamengine.sampling import SamplingParams

LENGTHS = (128, 512, 1024)
REPEATS = 5
ANSWER = 8
PROCESSES = True
"""A core in a process of its own for each engine."""

MOVED = ("remote_read_s", "remote_bytes")

PATIENCE_S, POLL_S = 60.0, 0.01
ROOM = 8
"""Times the longest prompt that the pool holds: a quarter of it is for transfers."""

Transport = Literal["shared_memory", "nixl"]
Report = Callable[[Progress], None]
Show = Callable[[str], None]


def measure(config: EngineConfig, report: Report, show: Show) -> dict[str, Any]:
    """Medians over `REPEATS` prompts of each of `LENGTHS`: computed by an engine that is alone, and by another one."""
    pages = ROOM * -(-(max(LENGTHS) + ANSWER) // config.page_size)
    config = structs.replace(config, enable_prefix_caching=False, kv_pages=config.kv_pages or 1 + pages)
    return anyio.run(_measure, config, report, show)


async def _measure(config: EngineConfig, report: Report, show: Show) -> dict[str, Any]:
    async with compose.open_engine(config, process=PROCESSES, progress=report) as engine:
        alone = {length: [await _answer(engine, ids) for ids in _prompts(engine, length)] for length in LENGTHS}
        kv = engine.kv
    transports: list[Transport] = ["shared_memory"]
    if importlib.util.find_spec("nixl"):
        transports.append("nixl")
    rows = []
    for transport in transports:
        for row in await _split(config, transport, report, alone):
            rows.append(row)
            show(_line(row))
    cores = usable_cores()
    show(f"split     two engines on {cores} cores share what one would have alone: these are costs, not gains")
    token_bytes = kv.page_bytes / kv.page_size
    return {"cores": cores, "bytes_per_token": token_bytes, "rows": rows}


async def _split(
    config: EngineConfig, transport: Transport, report: Report, alone: dict[int, list[Result]]
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        where = f"unix:{folder}/prefill"
        of_p = TransferConfig(role="prefill", listen=where, kv_transport=transport)
        of_d = TransferConfig(
            role="decode", peers=(where,), kv_transport=transport, prefill_threshold=1, on_load_failure="fail"
        )
        async with (
            compose.open_engine(structs.replace(config, transfer=of_p), process=PROCESSES, progress=report) as p,
            compose.open_engine(structs.replace(config, transfer=of_d), process=PROCESSES, progress=report) as d,
        ):
            await _met(d)
            return [await _compare(p, d, transport, length, alone[length]) for length in LENGTHS]


async def _met(engine: Engine) -> None:
    """Its peer is connected."""
    for _ in range(int(PATIENCE_S / POLL_S)):
        if (await engine.statistics())["remote_peers"]:
            return
        await anyio.sleep(POLL_S)
    raise EngineFailure(f"the engines did not meet within {PATIENCE_S:g} s")


async def _compare(p: Engine, d: Engine, transport: str, length: int, alone: list[Result]) -> dict[str, Any]:
    await _answer(d, _prompts(d, length)[0])  # the first one of a transport is slower
    before = await _moved(d)
    found, waits = [], []
    for ids in _prompts(d, length):
        computed = (await p.statistics())["step_s_sum"]
        found.append(await _answer(d, ids))
        steps_s = (await p.statistics())["step_s_sum"] - computed
        waits.append((found[-1].timing.ttft_ms or 0.0) - 1000 * steps_s)
    after = await _moved(d)
    copy_s = _copy_s(int(after["remote_bytes"] - before["remote_bytes"]) // len(found))
    if not all(result.timing.remote_prefill == "done" for result in found):
        raise EngineFailure(f"a prompt of {length} tokens was not computed by the other engine")
    read_s, moved = (after[name] - before[name] for name in MOVED)
    return {
        "transport": transport,
        "prompt_tokens": length,
        "alone_ttft_ms": _ttft_ms(alone),
        "ttft_ms": _ttft_ms(found),
        "first_token_ms": statistics.median(waits),
        "alone_longest_gap_ms": _longest_gap_ms(alone),
        "longest_gap_ms": _longest_gap_ms(found),
        "bytes": moved / len(found),
        "bytes_per_s": moved / read_s,
        "moved_ms": 1000 * read_s / len(found),
        "copy_ratio": copy_s * len(found) / read_s,
        "moved_of_prefill": 1000 * read_s / len(found) / _ttft_ms(alone),
        "equal": [result.token_ids for result in found] == [result.token_ids for result in alone],
    }


async def _moved(d: Engine) -> dict[str, float]:
    found = await d.statistics()
    return {name: found[name] for name in MOVED}


def _prompts(engine: Engine, length: int) -> list[tuple[int, ...]]:
    """The same in every engine."""
    draw = np.random.default_rng(length)
    return [tuple(draw.integers(0, engine.model.vocab_size, length).tolist()) for _ in range(REPEATS)]


async def _answer(engine: Engine, ids: tuple[int, ...]) -> Result:
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    return await engine.generate(token_ids=ids, sampling=sampling)


def _ttft_ms(results: list[Result]) -> float:
    return statistics.median(result.timing.ttft_ms or 0.0 for result in results)


def _longest_gap_ms(results: list[Result]) -> float:
    """Between two tokens: with a handover, the first two."""
    return statistics.median(result.timing.itl_max_ms or 0.0 for result in results)


def _copy_s(size: int) -> float:
    """Seconds in which one thread copies so many bytes, which it has touched before: the median of `REPEATS`."""
    theirs, ours = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        np.copyto(ours, theirs)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _line(row: dict[str, Any]) -> str:
    return (
        "split     {transport:>13} {prompt_tokens:>5} tok  first token {ttft_ms:8.1f} ms (alone {alone_ttft_ms:8.1f}), "
        "{first_token_ms:6.1f} ms of it not in steps; longest gap {longest_gap_ms:6.1f} ms (alone "
        "{alone_longest_gap_ms:6.1f}); pages {moved_ms:6.1f} ms, {copy_ratio:.2f} of a copy's speed, "
        "{moved_of_prefill:.2%} of the prefill; answers {verdict}"
    ).format(**row, verdict="equal" if row["equal"] else "DIFFERENT")
