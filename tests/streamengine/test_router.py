"""Behind a router that knows nothing of us: `smg`, sglang-router's successor, over OpenAI's routes."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import FakeRunner, fake_kv, fake_model
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving

SMG = Path(__file__).resolve().parents[2] / ".routers/bin/smg"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SMG.exists(), reason="smg is not installed: make test-slow installs it"),
]


@contextmanager
def routed(*workers: Served) -> Iterator[openai.OpenAI]:
    """A client of a router over ``workers``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    urls = [worker.url for worker in workers]
    options = ["--host", "127.0.0.1", "--port", port, "--policy", "round_robin", "--worker-urls", *urls]
    with subprocess.Popen([SMG, "launch", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        try:
            eventually(lambda: _answers(client))
            yield client
        finally:
            client.close()
            router.kill()
            router.wait(PATIENCE_S)


def _answers(client: openai.OpenAI) -> bool:
    try:
        return bool(client.completions.create(model="fake", prompt="are you there", max_tokens=1))
    except openai.APIError:
        return False


def endless() -> FakeRunner:
    return FakeRunner(kv=fake_kv(4097, 16), model=fake_model(60_000))


def running(worker: Served) -> float:
    number: float = worker.get("/v1/stats")[2]["running"]
    return number


def test_answers_streams_and_refusals_come_through_a_router() -> None:
    with serving(engine_over(roomy_runner())) as worker, routed(worker) as client:
        asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 1}
        whole = client.chat.completions.create(**asked)
        pieces = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
        assert whole.usage is not None and whole.usage.completion_tokens == 40
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="fake", prompt="hi", temperature=9)


def test_a_client_that_leaves_the_router_ends_its_answer_on_the_worker() -> None:
    with serving(engine_over(endless())) as worker, routed(worker) as client:
        stream = client.completions.create(model="fake", prompt="hi", max_tokens=50_000, stream=True)
        next(iter(stream))
        assert running(worker) == 1
        stream.close()
        eventually(lambda: running(worker) == 0)


def test_the_router_turns_to_another_worker_when_one_is_stopped() -> None:
    with (
        serving(engine_over(roomy_runner())) as first,
        serving(engine_over(roomy_runner())) as second,
        routed(first, second) as client,
    ):
        for _ in range(4):
            client.completions.create(model="fake", prompt="hi", max_tokens=2)
        assert all(worker.get("/v1/stats")[2]["engine_submitted"] >= 2 for worker in (first, second))
        first.stop()
        eventually(lambda: all(_answers(client) for _ in range(3)))
