"""Every example of the README and of the docstrings runs, against the server in memory."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamengine_sdk
from streamengine_sdk import AsyncClient, Client, testing
from streamengine_sdk.testing import FakeServer

README = Path(__file__).parents[2] / "sdk" / "README.md"
FAKE: dict[str, Any] = {"transport": FakeServer(["Hel", "lo"])}


def examples() -> Iterator[tuple[str, str]]:
    for module in (streamengine_sdk, testing):
        for name in module.__all__:
            owner = getattr(module, name)
            if not isinstance(owner, type):
                continue
            members = [(name, owner)] + [(f"{name}.{key}", value) for key, value in vars(owner).items()]
            for where, member in members:
                found = re.search(r"Example::\n\n(.*?)(\n\n\S|\Z)", inspect.getdoc(member) or "", re.DOTALL)
                if found and not where.startswith("_"):
                    yield where, textwrap.dedent(found.group(1))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)):
        yield f"README {number}", code


EXAMPLES = dict(examples())


def test_there_are_examples_of_all_that_matters() -> None:
    wanted = {"AsyncClient", "AsyncClient.stream", "AsyncClient.generate", "AsyncClient.resume", "Client"}
    assert wanted | {"FakeServer", "FaultyTransport", "README 0", "README 1"} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.anyio
async def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient("http://fake", **FAKE))
        stream = await stack.enter_async_context(client.stream("hi"))
        await stream.result()
        names = {
            **vars(streamengine_sdk),
            **vars(testing),
            "AsyncClient": lambda url, **more: AsyncClient(url, **{**FAKE, **more}),
            "Client": lambda url, **more: Client(url, **{**FAKE, **more}),
            "anyio": anyio,
            "client": client,
            "stream_id": stream.stream_id,
            "seq": 1,
        }
        code = EXAMPLES[name]
        with anyio.fail_after(20):
            if re.search("async with|await", code) and not name.startswith("README"):
                await run_lines(code, names)
            else:
                await anyio.to_thread.run_sync(run_script, code, names)
    assert re.search("Hel|lo", capsys.readouterr().out) or "assert" in code


async def run_lines(code: str, names: dict[str, Any]) -> None:
    compiled = compile(code, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)
    if inspect.isawaitable(result):
        await result


def run_script(code: str, names: dict[str, Any]) -> None:
    """Its imports would bring the real clients back."""
    code = re.sub(r"^from streamengine_sdk.* import .*$", "", code, flags=re.MULTILINE)
    exec(compile(code, "README", "exec"), names)
