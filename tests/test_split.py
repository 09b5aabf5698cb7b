"""Prefill apart from decode as a person uses it: two `serve` commands with the real model, and what a client gets.

Within one process there are no commands: there it is two servers over engines whose cores are threads of this one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import pytest

from streamengine import compose
from streamengine.config import EngineConfig, TransferConfig
from streamengine.engine import Engine
from streamengine.link import Progress
from streamengine_sdk import AsyncClient
from tests.serving import serving as serving_here
from tests.test_system import START_S, Command, pytestmark, serve
from tests.transfer_hosts import no_namespaces
from tests.transfers import NIXL, no_nixl

assert pytestmark  # the same model, and the same reason to skip
pytestmark = [*pytestmark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
ENGINE = {"dtype": "float32", "threads": 1, "kv_pages": 600, "max_model_len": 2048, "debug": True}
LENGTHS = (
    *(5, 7, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 200, 255),
    *(256, 257, 300, 384, 400, 511, 512, 513, 600, 700, 800, 900, 1000, 1200, 1500),
)
TOKENS = 16
SOME = range(0, len(LENGTHS), 2)
"""Prompts for those tests that need not ask them all."""
CROWD = 5
CROWDED: dict[str, Any] = {"kv_pages": 25, "transfer_deadline_s": 120}
"""So many prompts of 60 tokens, each with an answer of 80: no three of them fit into this pool at once."""


def prompts() -> list[tuple[int, ...]]:
    """Of `LENGTHS` tokens. Two pairs begin alike, for the prefix caches on both sides."""
    draw = random.Random(3)
    made = [tuple(draw.randrange(100, 40_000) for _ in range(length)) for length in LENGTHS]
    made[11] = made[9] + made[11][len(made[9]) :]
    made[-1] = made[-2] + made[-1][len(made[-2]) :]
    return made


class Reached(Protocol):
    """A server that can be asked."""

    @property
    def url(self) -> str: ...


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
            together = await all_at_once(
                partial(ask, url, prompts()[-number - 1], **drawn(number)) for number in range(6)
            )
            three = await anyio.to_thread.run_sync(ask_for_three, url, prompts()[-4])
            return [*found, *together, (three, None)]

    return anyio.run(work)


def ask_a_crowd(url: str) -> list[Found]:
    """All at once: greedy ones, some drawn by a seed or kept to a format, and three of one prompt."""
    draw = random.Random(4)
    asked = [tuple(draw.randrange(100, 40_000) for _ in range(60)) for _ in range(CROWD + 1)]

    async def three() -> Found:
        return await anyio.to_thread.run_sync(ask_for_three, url, asked[-1]), None

    async def work() -> list[Found]:
        with anyio.fail_after(200):
            several = (
                partial(ask, url, asked[number], **{"max_tokens": 80, **(drawn(number) if number % 3 else {})})
                for number in range(CROWD)
            )
            return await all_at_once([*several, three])

    return anyio.run(work)


def drawn(number: int) -> dict[str, Any]:
    """Settings of an answer that ``number`` is the seed of; it is kept to a format where that is odd."""
    guided = {"response_format": {"type": "regex", "regex": "[a-z]{4}( [0-9]+)*"}} if number % 2 else {}
    return {"temperature": 1.0, "seed": number, "ignore_eos": not guided, **guided}


async def all_at_once(work: Iterable[Callable[[], Awaitable[Found]]]) -> list[Found]:
    found: dict[int, Found] = {}

    async def one(number: int, ask: Callable[[], Awaitable[Found]]) -> None:
        found[number] = await ask()

    async with anyio.create_task_group() as tasks:
        for number, ask in enumerate(work):
            tasks.start_soon(one, number, ask)
    return [found[number] for number in sorted(found)]


@contextmanager
def serving(*options: str, prefix: tuple[str, ...] = (), **engine: Any) -> Iterator[Command]:
    given = ENGINE | engine
    flags = [
        part
        for name, value in given.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    command = serve(*flags, *options, prefix=prefix)
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


def statistics(command: Reached) -> dict[str, float]:
    with urllib.request.urlopen(f"{command.url}/v1/stats", timeout=20) as answer:
        found: dict[str, float] = json.load(answer)
        return found


def eventually(command: Reached, **wanted: float) -> None:
    """Some numbers of its statistics come to be these."""
    end = time.monotonic() + 30
    while (found := {name: statistics(command)[name] for name in wanted}) != wanted:
        assert time.monotonic() < end, f"{found}, not {wanted}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def said_alone() -> tuple[list[Any], list[Any]]:
    """What one engine says that has no other: to `ask_all` and to `ask_a_crowd`."""
    with serving() as command:
        found = [[answer for answer, _ in asks(command.url)] for asks in (ask_all, ask_a_crowd)]
        assert statistics(command)["preemptions"] == 0
    return found[0], found[1]


@pytest.fixture
def alone(said_alone: tuple[list[Any], list[Any]]) -> list[Any]:
    return said_alone[0]


@contextmanager
def split(folder: Path, transport: str, **of_d: Any) -> Iterator[tuple[Command, Command]]:
    """P and D, which has met it. ``of_d`` are settings of D alone."""
    where = f"unix:{folder / 'p'}"
    with ExitStack() as stack:
        p = stack.enter_context(serving("--role", "prefill", "--listen", where, "--kv-transport", transport))
        remote = ("--role", "decode", "--peer", where, "--kv-transport", transport, "--prefill-threshold", "1")
        d = stack.enter_context(serving(*remote, **of_d))
        eventually(d, remote_peers=1)
        yield p, d


@contextmanager
def split_here(folder: Path, transfer_deadline_s: float = 30, **engine: Any) -> Iterator[tuple[Reached, Reached]]:
    """The same with cores that are threads of this process."""
    where = f"unix:{folder / 'p'}"
    of_p = TransferConfig(role="prefill", listen=where, kv_transport="in_process")
    of_d = TransferConfig(
        role="decode",
        peers=(where,),
        prefill_threshold=1,
        kv_transport="in_process",
        transfer_deadline_s=transfer_deadline_s,
    )
    with ExitStack() as stack:
        made = []
        for transfer, settings in ((of_p, {}), (of_d, engine)):
            config = EngineConfig(**{**ENGINE, **settings, "transfer": transfer})
            opens = partial(_open_here, config)
            one = stack.enter_context(serving_here(opens, wait=False))
            end = time.monotonic() + START_S
            while one.get("/ready")[0] != 200:
                assert time.monotonic() < end and not one.ended.done(), "not ready"
                time.sleep(0.1)
            made.append(one)
        eventually(made[1], remote_peers=1)
        yield made[0], made[1]


def _open_here(config: EngineConfig, progress: Callable[[Progress], None]) -> AbstractAsyncContextManager[Engine]:
    return compose.open_engine(config, process=False, progress=progress)


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
        hold(p, d, alone)


def test_they_are_when_pages_move_within_one_process(tmp_path: Path, alone: list[Any]) -> None:
    with split_here(tmp_path) as (p, d):
        hold(p, d, alone)


def hold(p: Reached, d: Reached, alone: list[Any]) -> None:
    found = ask_all(d.url)
    assert [answer for answer, _ in found] == alone
    ways = [way for _, way in found]
    assert ways.count("done") >= len(LENGTHS) - 1, f"{ways}"
    eventually(d, transfer_pages=0, remote_zombies=0, remote_waiting=0)
    eventually(p, transfer_pages=0)


@pytest.mark.parametrize("where", ["in_process", "shared_memory"])
def test_they_are_when_the_decode_engine_is_so_small_that_it_preempts(
    tmp_path: Path, said_alone: tuple[list[Any], list[Any]], where: str
) -> None:
    with split_here(tmp_path, **CROWDED) if where == "in_process" else split(tmp_path, where, **CROWDED) as (p, d):
        found = ask_a_crowd(d.url)
        assert [answer for answer, _ in found] == said_alone[1]
        assert [way for _, way in found] == ["done"] * CROWD + [None]
        assert statistics(d)["preemptions"] > 0
        assert statistics(d)["remote_landed"] == CROWD + 1
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
    with split(tmp_path, transport, transfer_deadline_s=3, on_load_failure="recompute") as (p, d):
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
