"""Engines with peers, as their users see them."""

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from streamengine.config import TransferConfig
from streamengine.engine import Engine
from streamengine.errors import EngineFailure, StartupError, UnsupportedFeature
from tests.fakes import FakeRunner
from tests.streamengine.test_engine import expected, greedy, opened, roomy

pytestmark = pytest.mark.anyio

PROMPT = "a prompt of some length, so that it is worth the way"


async def peers_of(engine: Engine, count: int) -> None:
    while (await engine.statistics())["remote_peers"] != count:
        pass


async def test_a_client_is_told_whether_another_engine_computed_its_prompt(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p"
    here = TransferConfig(role="decode", peers=(address,), prefill_threshold=16)
    async with opened(roomy(shared=True), transfer=here) as (decode, _):
        alone = await decode.generate(PROMPT, sampling=greedy())
        async with opened(roomy(shared=True), transfer=TransferConfig(role="prefill", listen=address)) as (other, _):
            await peers_of(decode, 1)
            remote = await decode.generate("not " + PROMPT, sampling=greedy())
            short = await decode.generate("short", sampling=greedy())
            assert (await other.statistics())["prefills_done"] == 1
    told = [result.timing.remote_prefill for result in (alone, remote, short)]
    assert told == ["no_peer", "done", None]
    assert [alone.text, remote.text, short.text] == [expected(p) for p in (PROMPT, "not " + PROMPT, "short")]
    assert remote.timing.ttft_ms is not None and remote.timing.queue_ms is not None


async def test_an_engine_for_prefills_refuses_requests_by_its_role(tmp_path: Path) -> None:
    role = TransferConfig(role="prefill", listen=f"unix:{tmp_path}/p")
    async with opened(roomy(shared=True), transfer=role) as (engine, _):
        with pytest.raises(UnsupportedFeature, match="role prefill"):
            await engine.generate(PROMPT, sampling=greedy())
        assert engine.status == "ready"


async def test_two_engines_compute_prompts_for_each_other(tmp_path: Path) -> None:
    one, two = f"unix:{tmp_path}/1", f"unix:{tmp_path}/2"
    async with AsyncExitStack() as stack:
        engines = [
            (await stack.enter_async_context(opened(roomy(shared=True), transfer=role)))[0]
            for role in (
                TransferConfig(listen=one, peers=(two,), prefill_threshold=16),
                TransferConfig(listen=two, peers=(one,), prefill_threshold=16),
            )
        ]
        for engine in engines:
            await peers_of(engine, 1)
        for number, engine in enumerate(engines):
            result = await engine.generate(f"{number}: {PROMPT}", sampling=greedy())
            assert (result.text, result.timing.remote_prefill) == (expected(f"{number}: {PROMPT}"), "done")


async def test_on_load_failure_fail_reaches_the_client_with_the_reason(tmp_path: Path) -> None:
    role = TransferConfig(peers=(f"unix:{tmp_path}/p",), prefill_threshold=16, on_load_failure="fail")
    async with opened(roomy(shared=True), transfer=role) as (engine, _):
        with pytest.raises(EngineFailure, match="no engine for prefills is connected"):
            await engine.generate(PROMPT, sampling=greedy())
        assert (await engine.generate("short", sampling=greedy())).text == expected("short")


@pytest.mark.parametrize(
    ("build", "transfer", "why"),
    [
        (roomy, {"peers": ("unix:/nowhere",)}, "the KV cache is not in shared memory"),
        (lambda: roomy(shared=True), {"listen": "unix:/no/such/folder"}, "No such file"),
        (lambda: Remote(shared=True), {"peers": ("unix:/nowhere",)}, "cannot be moved by shared_memory"),
    ],
)
async def test_what_cannot_be_moved_or_listened_at_is_told_at_the_start(build: Any, transfer: Any, why: str) -> None:
    with pytest.raises(StartupError, match=re.escape(why)):
        async with opened(build(), transfer=TransferConfig(**transfer)):
            pass


class Remote(FakeRunner):
    """Its memory is on a device."""

    def kv_memory(self) -> None:  # type: ignore[override]
        return None
