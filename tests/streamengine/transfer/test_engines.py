"""Engines with peers, as their users see them."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from compiled.step import LoadError
from streamengine.compose import open_engine
from streamengine.config import EngineConfig, TransferConfig
from streamengine.engine import Engine
from streamengine.errors import EngineFailure, StartupError, UnsupportedFeature
from streamengine.link import Progress
from streamengine.transfer.connection import listen
from tests.fakes import FakeRunner
from tests.serving import engine_over
from tests.streamengine.test_engine import expected, greedy, opened, roomy, until

pytestmark = pytest.mark.anyio

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
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


async def test_engines_of_one_process_move_pages_within_it(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p"
    there = TransferConfig(role="prefill", listen=address, kv_transport="in_process")
    here = TransferConfig(role="decode", peers=(address,), prefill_threshold=16, kv_transport="in_process")
    async with opened(roomy(), transfer=there) as (other, _), opened(roomy(), transfer=here, debug=True) as (decode, _):
        await peers_of(decode, 1)
        result = await decode.generate(PROMPT, sampling=greedy())
        assert (result.text, result.timing.remote_prefill) == (expected(PROMPT), "done")
        assert (await decode.statistics())["remote_bytes"] > 0
        assert (await other.statistics())["prefills_done"] == 1


IN_ANOTHER_PROCESS = """
import os, sys, anyio, anyio.to_thread
from streamengine.config import TransferConfig
from tests.streamengine.test_engine import opened, roomy

async def main():
    transfer = TransferConfig(role="prefill", listen=sys.argv[1], kv_transport="in_process")
    async with opened(roomy(), transfer=transfer):
        os.write(1, b"ready")
        await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main)
"""


async def test_an_engine_in_another_process_is_no_peer_within_this_one_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/p"
    other = await anyio.open_process([sys.executable, "-c", IN_ANOTHER_PROCESS, address], env=ENVIRONMENT, stderr=None)
    async with other:
        assert other.stdin is not None and other.stdout is not None
        assert await other.stdout.receive() == b"ready"
        here = TransferConfig(role="decode", peers=(address,), prefill_threshold=16, kv_transport="in_process")
        async with opened(roomy(), transfer=here) as (decode, _):
            why = f"it is in process {other.pid}, not in ours, {os.getpid()}"
            await until(lambda: why in caplog.text)
            result = await decode.generate(PROMPT, sampling=greedy())
            assert (result.text, result.timing.remote_prefill) == (expected(PROMPT), "no_peer")
        await other.stdin.aclose()
        assert await other.wait() == 0


async def test_pages_cannot_move_within_a_process_where_the_core_is_in_another() -> None:
    transfer = TransferConfig(listen="unix:/nowhere", kv_transport="in_process")
    with pytest.raises(StartupError, match="kv_transport in_process is for cores that are threads") as caught:
        open_engine(EngineConfig(transfer=transfer))
    assert caught.value.param == "kv_transport"


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


async def test_strangers_are_no_lost_peers_of_an_engine_that_has_peers_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/p"
    role = TransferConfig(listen=address, peers=(f"unix:{tmp_path}/nobody",), peer_key="a secret")
    async with opened(roomy(shared=True), transfer=role) as (engine, _):
        async with await anyio.connect_unix(tmp_path / "p") as stranger:
            await stranger.send(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                while True:
                    await stranger.receive()
        await until(lambda: "nobody" in caplog.text)
        assert (await engine.statistics())["remote_mismatches"] == 0
        assert "accepted" not in caplog.text


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


@pytest.mark.parametrize("family", ["unix", "tcp"])
async def test_an_address_in_use_is_told_before_a_model_is_loaded(tmp_path: Path, family: str) -> None:
    built = False

    def build(report: Callable[[Progress], None]) -> FakeRunner:
        nonlocal built
        built = True
        return roomy(shared=True)

    listener = listen(f"unix:{tmp_path}/p" if family == "unix" else "127.0.0.1:0")
    where = listener.getsockname()
    address = f"unix:{where}" if family == "unix" else f"127.0.0.1:{where[1]}"
    with closing(listener), pytest.raises(StartupError, match=f"^{address} cannot be listened on: .*in use"):
        async with engine_over(build, transfer=TransferConfig(listen=address))(lambda _: None):
            pass
    assert not built


async def test_an_engine_that_cannot_load_gives_its_address_up(tmp_path: Path) -> None:
    def build(report: Callable[[Progress], None]) -> FakeRunner:
        assert (tmp_path / "p").is_socket()
        raise LoadError("no such model")

    with pytest.raises(StartupError, match="no such model"):
        async with engine_over(build, transfer=TransferConfig(listen=f"unix:{tmp_path}/p"))(lambda _: None):
            pass
    assert not (tmp_path / "p").exists()


async def test_engines_with_the_same_key_work_together_and_one_without_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/p"
    there = TransferConfig(role="prefill", listen=address, peer_key="a secret")
    async with opened(roomy(shared=True), transfer=there):
        here = TransferConfig(role="decode", peers=(address,), prefill_threshold=16)
        async with opened(roomy(shared=True), transfer=structs.replace(here, peer_key="a secret")) as (decode, _):
            await peers_of(decode, 1)
            assert (await decode.generate(PROMPT, sampling=greedy())).timing.remote_prefill == "done"
        async with opened(roomy(shared=True), transfer=here) as (decode, _):
            await until(lambda: "it wants a peer_key, and here is none" in caplog.text)
            await until(lambda: "it has no peer_key, and here is one" in caplog.text)
            assert (await decode.generate(PROMPT, sampling=greedy())).timing.remote_prefill == "no_peer"
    assert "a secret" not in caplog.text


@pytest.mark.parametrize(
    ("listen", "key", "warned"),
    [
        ("0.0.0.0:0", None, True),
        ("0.0.0.0:0", "a secret", False),
        ("127.0.0.1:0", None, False),
        ("unix:p", None, False),
    ],
)
async def test_an_address_that_others_can_reach_is_warned_about_without_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listen: str,
    key: str | None,
    warned: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened(roomy(shared=True), transfer=TransferConfig(listen=listen, peer_key=key)):
        assert ("anybody who reaches 0.0.0.0" in caplog.text) == warned


class Remote(FakeRunner):
    """Its memory is on a device."""

    def kv_memory(self) -> None:  # type: ignore[override]
        return None
