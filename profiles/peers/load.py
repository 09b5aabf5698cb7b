"""A client of OpenAI's streamed completions that many of us can afford to run beside the server it measures."""

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass

TEXT = "the quick brown fox jumps over a lazy dog while rain falls on old stone bridges near the quiet harbour"
WORDS = TEXT.split()
PROMPT_WORDS = 100
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """When its request was sent and its pieces arrived, in seconds, and how many tokens the server counted."""

    sent: float
    pieces: tuple[float, ...]
    tokens: int


async def load(port: int, model: str, streams: int, rounds: int) -> dict[str, float]:
    """``streams`` clients, each ``rounds`` requests one after the other, no two prompts the same."""
    started = time.perf_counter()
    lanes = [_lane(port, model, streams * 1000 + lane, rounds) for lane in range(streams)]
    answers = [answer for lane in await asyncio.gather(*lanes) for answer in lane]
    seconds = time.perf_counter() - started
    gaps = [after - before for answer in answers for before, after in itertools.pairwise(answer.pieces)]
    first = [answer.pieces[0] - answer.sent for answer in answers]
    return {
        "tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * _p99(gaps),
        "ttft_p50_ms": 1e3 * statistics.median(first),
        "ttft_p99_ms": 1e3 * _p99(first),
    }


async def complete(port: int, model: str, prompt: str, tokens: int) -> Answer:
    """One completion. OSError while nobody listens; RuntimeError with the answer's head if it is refused."""
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    body = json.dumps(request).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(500)).decode(errors="replace"))
        pieces, counted = [], 0
        # Each event is one line, whatever the chunks of the transfer are.
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                counted = event["usage"]["completion_tokens"]
            if event["choices"] and event["choices"][0]["text"]:
                pieces.append(time.perf_counter())
        return Answer(sent, tuple(pieces), counted or len(pieces))
    finally:
        writer.close()


async def _lane(port: int, model: str, number: int, rounds: int) -> list[Answer]:
    answers = []
    for turn in range(rounds):
        words = [WORDS[(number * 7 + turn * 3 + i * (number % 5 + 1)) % len(WORDS)] for i in range(PROMPT_WORDS - 1)]
        answers.append(await complete(port, model, f"{number}.{turn} " + " ".join(words), ANSWER_TOKENS))
    return answers


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]
