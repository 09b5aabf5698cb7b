"""Prefill apart from decode as a person uses it: two `serve` commands with the real model, and what a client gets."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamengine_sdk import AsyncClient
from tests.test_system import Command, pytestmark, serve
from tests.transfer_hosts import no_namespaces
from tests.transfers import NIXL, no_nixl

assert pytestmark  # the same model, and the same reason to skip
pytestmark = [*pytestmark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ("--dtype", "float32", "--threads", "1", "--kv-pages", "600", "--max-model-len", "2048", "--debug")
LENGTHS = (
    *(5, 7, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 200, 255),
    *(256, 257, 300, 384, 400, 511, 512, 513, 600, 700, 800, 900, 1000, 1200, 1500),
)
TOKENS = 16
SOME = range(0, len(LENGTHS), 2)
"""Prompts for those tests that need not ask them all."""


def prompts() -> list[tuple[int, ...]]:
    """Of `LENGTHS` tokens. Two pairs begin alike, for the prefix caches on both sides."""
    draw = random.Random(3)
    made = [tuple(draw.randrange(100, 40_000) for _ in range(length)) for length in LENGTHS]
    made[11] = made[9] + made[11][len(made[9]) :]
    made[-1] = made[-2] + made[-1][len(made[-2]) :]
    return made


Found = tuple[Any, str | None]
"""An answer, and what came of a remote prefill, where that is told."""


async def ask(url: str, prompt: tuple[int, ...], **options: Any) -> Found:
    async with AsyncClient(url) as client:
        settings = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **options}
        result = await client.generate(token_ids=prompt, **settings)
        assert result.token_ids is not None and result.timing is not None
        return tuple(result.token_ids), result.timing.remote_prefill


def ask_for_three(url: str, prompt: tuple[int, ...]) -> list[str]:
    """Three answers to one prompt, over HTTP: the WebSocket gives one."""
    asked = {"model": "smollm2-135m", "prompt": prompt, "n": 3, "seed": 5, "max_tokens": TOKENS}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def ask_all(url: str) -> list[Found]:
    """Greedily, one after the other; then some drawn by a seed or kept to a format, all at once; then three of one."""

    async def work() -> list[Found]:
        with anyio.fail_after(500):
            found = [await ask(url, prompt) for prompt in prompts()]
            together: dict[int, Found] = {}

            async def one(number: int) -> None:
                guided = {"response_format": {"type": "regex", "regex": "[a-z]{4}( [0-9]+)*"}} if number % 2 else {}
                options = {"temperature": 1.0, "seed": number, "ignore_eos": not guided, **guided}
                together[number] = await ask(url, prompts()[-number - 1], **options)

            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(one, number)
            three = await anyio.to_thread.run_sync(ask_for_three, url, prompts()[-4])
            return [*found, *(together[number] for number in range(6)), (three, None)]

    return anyio.run(work)


@contextmanager
def serving(*options: str, prefix: tuple[str, ...] = ()) -> Iterator[Command]:
    command = serve(*ENGINE, *options, prefix=prefix)
    with command.process:
        try:
            yield command
        finally:
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGTERM)
                try:
                    command.process.wait(60)
                except subprocess.TimeoutExpired:
                    command.process.kill()


def statistics(command: Command) -> dict[str, float]:
    with urllib.request.urlopen(f"{command.url}/v1/stats", timeout=20) as answer:
        found: dict[str, float] = json.load(answer)
        return found


def eventually(command: Command, **wanted: float) -> None:
    """Some numbers of its statistics come to be these."""
    end = time.monotonic() + 30
    while (found := {name: statistics(command)[name] for name in wanted}) != wanted:
        assert time.monotonic() < end, f"{found}, not {wanted}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What one engine says that has no other."""
    with serving() as command:
        return [answer for answer, _ in ask_all(command.url)]


@contextmanager
def split(folder: Path, transport: str, *of_decode: str) -> Iterator[tuple[Command, Command]]:
    """P and D, which has met it."""
    where = f"unix:{folder / 'p'}"
    with ExitStack() as stack:
        p = stack.enter_context(serving("--role", "prefill", "--listen", where, "--kv-transport", transport))
        remote = ("--role", "decode", "--peer", where, "--kv-transport", transport, "--prefill-threshold", "1")
        d = stack.enter_context(serving(*remote, *of_decode))
        eventually(d, remote_peers=1)
        yield p, d


@pytest.fixture(params=["shared_memory", "nixl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "nixl":
        if reason := no_nixl():
            pytest.skip(reason)
        monkeypatch.syspath_prepend(str(NIXL))
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return str(request.param)


def test_answers_are_token_by_token_those_of_one_engine_alone(transport: str, tmp_path: Path, alone: list[Any]) -> None:
    with split(tmp_path, transport) as (p, d):
        found = ask_all(d.url)
        assert [answer for answer, _ in found] == alone
        ways = [way for _, way in found]
        assert ways.count("done") >= len(LENGTHS) - 1, f"{ways}"
        eventually(d, transfer_pages=0, remote_zombies=0, remote_waiting=0)
        eventually(p, transfer_pages=0)


def test_they_are_when_the_prefill_engine_is_another_host_that_only_tcp_reaches(
    tmp_path: Path, alone: list[Any]
) -> None:
    if reason := no_nixl() or no_namespaces():
        pytest.skip(reason)
    expected = tmp_path / "alone.json"
    expected.write_text(json.dumps(alone))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}:{NIXL}"}
    command = ["unshare", "-n", "-m", sys.executable, "-m", "tests.split_hosts", str(expected)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=550, env=env, cwd=ROOT)
    assert ran.returncode == 0 and ran.stdout.endswith("ok\n"), ran.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_prefill_engine_dies_or_hangs_the_answers_still_come_and_no_page_is_lost(
    transport: str, tmp_path: Path, alone: list[Any], how: signal.Signals
) -> None:
    deadline = ("--transfer-deadline-s", "3", "--on-load-failure", "recompute")
    with split(tmp_path, transport, *deadline) as (p, d):
        found: dict[int, Found] = {}

        async def work() -> None:
            async def one(number: int) -> None:
                found[number] = await ask(d.url, prompts()[number])

            with anyio.fail_after(200):
                found[0] = await ask(d.url, prompts()[0])
                async with anyio.create_task_group() as tasks:
                    for number in SOME[1:]:
                        tasks.start_soon(one, number)
                    await anyio.sleep(1)  # into the middle of it
                    os.kill(p.core, how)

        core = p.core
        anyio.run(work)
        assert [found[number][0] for number in SOME] == [alone[number] for number in SOME]
        assert found[0][1] == "done"
        assert any(way != "done" for _, way in found.values()), "it did not die in the middle"
        if how == signal.SIGSTOP:
            os.kill(core, signal.SIGCONT)
        eventually(d, transfer_pages=0, remote_zombies=0, remote_waiting=0)
