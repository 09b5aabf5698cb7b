"""The engine over the real link and the real core; only the runner is a fake."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import anyio
import numpy
import pytest
from anyio.to_thread import run_sync

from compiled.step import LoadError, Runner
from streamengine.compose import core_process
from streamengine.config import EngineConfig
from streamengine.core import run_core
from streamengine.engine import Engine, Generate, Result
from streamengine.errors import (
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    ShuttingDown,
    StartupError,
    StreamEngineError,
    Unavailable,
    UnsupportedFeature,
)
from streamengine.link import CoreLink, FrontLink, LinkClosed, Progress, link_pair
from streamengine.log import Log, TextDelta
from streamengine.sampling import SamplingParams
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    Answer,
    ByteTokenizer,
    FakeRunner,
    beam_oracle,
    fake_kv,
    fake_model,
    oracle,
    script,
)

pytestmark = pytest.mark.anyio

PATIENCE_S = 20
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def greedy(max_tokens: int | None = 20, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def roomy(**more: Any) -> FakeRunner:
    return FakeRunner(kv=fake_kv(pages=1025, page_size=16), **{"model": fake_model(2048), **more})


def answers(prompt: str, reply: str | Sequence[int]) -> Answer:
    return script({prompt: reply})


def expected(prompt: str, max_tokens: int = 20) -> str:
    return bytes(oracle(prompt.encode(), max_tokens, stop_token_ids=(EOS,))).decode()


class Cores:
    """Starts cores in threads; `kill` takes the newest one's socket away, as the death of a process does."""

    def __init__(self, build: Callable[[], Runner]) -> None:
        self._build = build
        self.started = 0
        self._back: socket.socket

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[FrontLink]:
        front, back = link_pair()
        self.started += 1
        self._back = back
        thread = threading.Thread(target=self._run, args=(CoreLink(back),))
        thread.start()
        link = await FrontLink.open(front)
        try:
            yield link
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()
                await run_sync(thread.join, PATIENCE_S)

    def kill(self) -> None:
        self._back.shutdown(2)

    def _run(self, link: CoreLink) -> None:
        def build(config: EngineConfig, report: Callable[[Progress], None]) -> Runner:
            report(Progress("load", 1, 2))
            return self._build()

        run_core(link, build)


@asynccontextmanager
async def opened(
    runner: Runner | None = None, tokenizer: Any = None, *, restart: bool = False, **config: Any
) -> AsyncIterator[tuple[Engine, Cores]]:
    cores = Cores(lambda: runner or roomy())
    with anyio.fail_after(PATIENCE_S):
        async with Engine(
            EngineConfig(**config), cores.connect, lambda folder: tokenizer or ByteTokenizer(), restart=restart
        ) as engine:
            yield engine, cores


async def ended(log: Log) -> Log:
    bell = Bell()
    reader = log.reader(bell)
    while not log.ended:
        await bell.event.wait()
        bell.event = anyio.Event()
    reader.close()
    return log


async def until(condition: Callable[[], object]) -> None:
    """For what no event tells. Bounded by the test's own patience."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.001)


class Bell:
    def __init__(self) -> None:
        self.event = anyio.Event()

    def set(self) -> None:
        self.event.set()


# answers


async def test_an_answer_is_the_oracles_as_a_whole_and_as_a_stream() -> None:
    async with opened() as (engine, _):
        result = await engine.generate("hello", sampling=GREEDY)
        assert result.text == expected("hello")
        assert bytes(result.token_ids).decode() == result.text
        assert (result.finish_reason, result.stop_sequence, result.cause) == ("length", None, None)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 20)
        deltas: list[TextDelta] = [delta async for delta in engine.stream("hello", sampling=GREEDY)]
        assert "".join(delta.text for delta in deltas) == result.text
        assert [token for delta in deltas for token in delta.token_ids] == list(result.token_ids)
        seqs = [(delta.seq - delta.n, delta.seq) for delta in deltas]
        assert [begin for begin, _ in seqs] == [0, *[end for _, end in seqs[:-1]]]
        timing = result.timing
        assert timing.queue_ms is not None and timing.ttft_ms is not None and timing.decode_ms is not None
        assert timing.total_ms >= timing.ttft_ms >= timing.queue_ms >= 0
        assert timing.itl_max_ms is not None


async def test_eight_answers_at_once_are_what_each_is_alone() -> None:
    prompts = [f"prompt {i} " * (i + 1) for i in range(8)]
    texts: dict[str, str] = {}

    async with opened(FakeRunner(kv=fake_kv(pages=97, page_size=4)), max_num_batched_tokens=64) as (engine, _):

        async def run(prompt: str) -> None:
            texts[prompt] = "".join([text async for text in engine.stream(prompt, sampling=greedy(30)).text])

        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(run, prompt)
        assert (await engine.statistics())["engine_open"] == 0
    assert texts == {prompt: expected(prompt, 30) for prompt in prompts}


async def test_two_engines_live_in_one_process() -> None:
    async with opened() as (one, _), opened(roomy(answer=answers("hello", "other"))) as (other, _):
        assert one.epoch != other.epoch
        assert (await one.generate("hello", sampling=GREEDY)).text == expected("hello")
        assert (await other.generate("hello", sampling=GREEDY)).text == "other"


async def test_a_prompt_of_ids_and_a_chat_reach_the_core_as_they_are() -> None:
    async with opened() as (engine, _):
        ids = await engine.generate(token_ids=list(b"hello"), sampling=GREEDY)
        assert ids.text == expected("hello")
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        prompt = ByteTokenizer().chat([{"role": "user", "content": "hi"}])
        chat = await engine.generate(messages=messages, sampling=GREEDY)
        assert list(chat.token_ids) == oracle(prompt, 20)
        long = [{"role": "user", "content": "word " * 200} for _ in range(2)]
        prompt = ByteTokenizer().chat(long)
        assert list((await engine.generate(messages=long, sampling=GREEDY)).token_ids) == oracle(prompt, 20)


async def test_what_a_template_looks_at_goes_with_messages_and_nothing_else() -> None:
    options = {"enable_thinking": False}
    messages = [{"role": "user", "content": "hi"}]
    async with opened() as (engine, _):
        chat = await engine.generate(messages=messages, chat_template_kwargs=options, sampling=GREEDY)
        assert list(chat.token_ids) == oracle(ByteTokenizer().chat(messages, options=options), 20)
        with pytest.raises(InvalidRequest, match="need messages"):
            await engine.generate("hi", chat_template_kwargs=options, sampling=GREEDY)


async def test_the_token_that_ends_an_answer_is_counted_and_has_no_text() -> None:
    async with opened(roomy(answer=answers("q", "done"))) as (engine, _):
        result = await engine.generate("q", sampling=GREEDY)
        assert (result.text, result.finish_reason, result.token_ids) == ("done", "stop", (*b"done", EOS))
        assert result.usage.completion_tokens == 5
        letter = await engine.generate("q", sampling=greedy(stop_token_ids=(ord("n"),)))
        assert (letter.text, letter.finish_reason, letter.token_ids) == ("do", "stop", tuple(b"don"))
        onward = await engine.generate("q", sampling=greedy(8, ignore_eos=True))
        assert (onward.text, onward.finish_reason) == ("done", "length")
        assert onward.token_ids == (*b"done", *[EOS] * 4)


async def test_a_stop_string_ends_the_answer_and_frees_its_pages() -> None:
    reply = "one two three four " * 50
    async with opened(roomy(answer=answers("q", reply))) as (engine, _):
        result = await engine.generate("q", sampling=greedy(900, stop=("four", "three")))
        assert (result.text, result.finish_reason, result.stop_sequence) == ("one two ", "stop", "three")
        assert bytes(result.token_ids) == b"one two three"
        assert result.usage.completion_tokens == 13
        # The core learns of it by a message that the next one follows.
        statistics = await engine.statistics()
        assert (statistics["kv_pages_used"], statistics["running"]) == (0, 0)


async def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop_and_no_length() -> None:
    async with opened(roomy(answer=answers("q", "abcd"))) as (engine, _):
        result = await engine.generate("q", sampling=greedy(4, stop=("cd",)))
        assert (result.text, result.finish_reason, result.stop_sequence) == ("ab", "stop", "cd")


async def test_a_beginning_of_a_stop_string_is_given_out_at_every_kind_of_end() -> None:
    runner = roomy(answer=answers("q", "ab<e"))
    async with opened(runner) as (engine, _):
        for max_tokens, reason in ((4, "length"), (9, "stop")):
            result = await engine.generate("q", sampling=greedy(max_tokens, stop=("<end>",)))
            assert (result.text, result.finish_reason) == ("ab<e", reason)


async def test_without_max_tokens_an_answer_may_fill_what_the_context_or_the_cache_holds() -> None:
    async with opened(FakeRunner(model=fake_model(64), kv=fake_kv(pages=65, page_size=4))) as (engine, _):
        assert (await engine.generate("hello", sampling=greedy(None))).usage.total_tokens == 64
    async with opened(FakeRunner(kv=fake_kv(pages=9, page_size=4))) as (engine, _):
        assert (await engine.generate("hello", sampling=greedy(None))).usage.total_tokens == 33


async def test_a_seed_is_drawn_where_none_is_given_and_kept_where_one_is() -> None:
    async with opened() as (engine, _):

        async def text(seed: int | None) -> str:
            sampling = SamplingParams(temperature=1, max_tokens=30, seed=seed)
            return (await engine.generate("hello", sampling=sampling)).text

        assert await text(7) == await text(7)
        assert await text(None) != await text(None)


# several answers, scores and cached prefixes


def drawn(max_tokens: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1, max_tokens=max_tokens, **more)


async def test_several_answers_are_what_each_is_alone_with_a_seed_of_its_own() -> None:
    async with opened() as (engine, _):
        alone = [(await engine.generate("hello", sampling=drawn(seed=7 + i))).text for i in range(3)]
        result = await engine.generate("hello", sampling=drawn(seed=7, n=3))
        assert [choice.text for choice in result.choices] == alone
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 60)
        best = await engine.generate("hello", sampling=drawn(seed=7, best_of=3, logprobs=0))
        means = [sum(item.logprob for item in choice.logprobs) / 20 for choice in best.choices]
        assert best.text in alone and len(means) == 1
        assert best.usage.completion_tokens == 60
        everyone = await engine.generate("hello", sampling=drawn(seed=7, n=3, logprobs=0))
        assert means[0] == max(sum(item.logprob for item in choice.logprobs) / 20 for choice in everyone.choices)


async def test_a_stop_string_in_one_of_several_answers_leaves_the_others_whole() -> None:
    async with opened() as (engine, _):
        whole = [choice.text for choice in (await engine.generate("hello", sampling=drawn(400, seed=7, n=3))).choices]
        pairs = (whole[1][i : i + 3] for i in range(100))
        stop = next(pair for pair in pairs if pair not in whole[0] and pair not in whole[2])
        result = await engine.generate("hello", sampling=drawn(400, seed=7, n=3, stop=(stop,)))
        assert [choice.text for choice in result.choices] == [whole[0], whole[1].partition(stop)[0], whole[2]]
        assert [choice.stop_sequence for choice in result.choices] == [None, stop, None]
        statistics = await engine.statistics()
        assert (statistics["running"], statistics["kv_pages_used"]) == (0, 0)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
async def test_beams_are_those_of_a_plain_search(length_penalty: float) -> None:
    async with opened() as (engine, _):
        sampling = SamplingParams(
            beam_width=4, n=3, max_tokens=8, length_penalty=length_penalty, ignore_eos=True, prompt_logprobs=0
        )
        result = await engine.generate("hello", sampling=sampling)
        assert "".join(item.text for item in result.prompt_logprobs) == "ello"
        found = beam_oracle(b"hello", 8, 4, n=3, length_penalty=length_penalty)
        assert [(list(choice.token_ids), choice.beam_score) for choice in result.choices] == found
        alone = SamplingParams(beam_width=4, max_tokens=8)
        (delta,) = [delta async for delta in engine.stream("hello", sampling=alone)]
        assert list(delta.token_ids) == beam_oracle(b"hello", 8, 4)[0][0]


async def test_scores_of_the_prompt_are_whole_on_a_cached_prompt_and_in_chunks() -> None:
    prompt = "a prompt that fills some pages of the cache"
    async with opened(max_num_seqs=4, max_num_batched_tokens=7) as (engine, _):
        for _ in range(2):
            result = await engine.generate(prompt, sampling=greedy(2, prompt_logprobs=2))
            assert "".join(item.text for item in result.prompt_logprobs) == prompt[1:]
            assert [len(item.top) for item in result.prompt_logprobs] == [2] * (len(prompt) - 1)


async def test_cached_tokens_are_counted_within_a_tenant_and_never_across() -> None:
    prompt = "x" * 100
    async with opened() as (engine, _):
        counts = [
            (await engine.generate(prompt, sampling=GREEDY, tenant=tenant)).usage.cached_tokens
            for tenant in ("one", "one", "other")
        ]
        assert counts == [0, 96, 0]
        several = await engine.generate(prompt, sampling=drawn(n=3), tenant="one")
        assert several.usage.cached_tokens == 96


async def test_a_stop_string_inside_an_accepted_guess_gives_the_answer_without_guessing() -> None:
    reply = "one two three. one two three. one two three. END one two three."
    async with opened(roomy(answer=answers("q", reply))) as (engine, _):
        plain, guessed = [
            await engine.generate("q", sampling=greedy(70, stop=("three. END",), logprobs=1, speculate=most))
            for most in (0, 4)
        ]
        assert (await engine.statistics())["accepted_tokens"] > 0
    assert plain.text == reply.partition("three. END")[0]
    for field in ("text", "token_ids", "logprobs", "usage", "stop_sequence"):
        assert getattr(guessed, field) == getattr(plain, field)


# refusals


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({}, InvalidRequest, "prompt"),
        ({"prompt": "a", "messages": ({"role": "user", "content": "a"},)}, InvalidRequest, "messages"),
        ({"prompt": "a", "token_ids": (1,)}, InvalidRequest, "token_ids"),
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"messages": ()}, InvalidRequest, "messages"),
        ({"messages": ({"role": "user"},)}, InvalidRequest, "messages[0].content"),
        ({"messages": ({"role": "user", "content": [{"type": "image"}]},)}, UnsupportedFeature, None),
        ({"token_ids": ()}, InvalidRequest, "token_ids"),
        ({"token_ids": (1, VOCAB_SIZE)}, InvalidRequest, "token_ids"),
        ({"token_ids": (-1,)}, InvalidRequest, "token_ids"),
        ({"token_ids": (True,)}, InvalidRequest, "token_ids"),
        ({"token_ids": "ab"}, InvalidRequest, "token_ids"),
        ({"prompt": "a", "sampling": greedy(stop_token_ids=(VOCAB_SIZE,))}, InvalidRequest, "stop_token_ids"),
        ({"prompt": "a" * 2048}, ContextLengthExceeded, "prompt"),
        ({"token_ids": (1,) * 3000}, ContextLengthExceeded, "token_ids"),
        ({"messages": ({"role": "user", "content": "a" * 5000},)}, ContextLengthExceeded, "messages"),
        ({"messages": ({"role": "user", "content": ""},) * 3000}, ContextLengthExceeded, "messages"),
        ({"prompt": "a" * 2000, "sampling": greedy(49)}, ContextLengthExceeded, "max_tokens"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_the_name_of_the_field(
    asked: dict[str, Any], kind: type[StreamEngineError], param: str | None
) -> None:
    async with opened() as (engine, _):
        with pytest.raises(kind) as error:
            await engine.submit(Generate(**asked))
        assert param is None or error.value.param == param
        assert (await engine.generate("hello", sampling=GREEDY)).text == expected("hello")
        assert (await engine.statistics())[f"engine_refused_{kind.code}"] == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", "a\ud800"),
        ("sampling", None),
        ("sampling", {"temperature": 0}),
        ("queue_s", 0),
        ("queue_s", 10**400),
        ("total_s", float("nan")),
        ("priority", 101),
        ("priority", True),
        ("tenant", 5),
        ("tenant", "x" * 257),
    ],
)
async def test_a_field_that_is_no_such_thing_is_refused_before_anything_is_asked(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as error:
        Generate(**{field: value})
    assert error.value.param == field
    assert len(error.value.message) <= 300


async def test_numbers_of_other_libraries_reach_the_core_as_plain_ones() -> None:
    class Id(int):
        pass

    class Name(str):
        pass

    numbers: dict[str, Any] = {
        "temperature": numpy.float64(0),
        "max_tokens": numpy.int64(20),
        "top_p": numpy.float32(1),
        "logit_bias": {Id(1): Fraction(1)},
    }
    sampling = SamplingParams(**numbers)
    async with opened() as (engine, _):
        ids: list[Any] = [*numpy.array(list(b"hell")), Id(ord("o"))]
        result = await engine.generate(token_ids=ids, sampling=sampling, priority=Id(3), tenant=Name("x"))
        assert result.text == expected("hello")


async def test_refusals_have_the_numbers_in_them() -> None:
    async with opened() as (engine, _):
        with pytest.raises(ContextLengthExceeded, match="2100 tokens; the context holds 2048") as prompt:
            await engine.submit(Generate(prompt="a" * 2100))
        assert prompt.value.details == {"prompt_tokens": 2100, "limit": 2048}
        with pytest.raises(ContextLengthExceeded, match="make 2049 tokens; the context holds 2048") as answer:
            await engine.submit(Generate(prompt="a" * 2000, sampling=greedy(49)))
        assert answer.value.details == {"prompt_tokens": 2000, "max_tokens": 49, "limit": 2048}
        with pytest.raises(InvalidRequest, match=f"holds {VOCAB_SIZE}, .* ids are 0 to {VOCAB_SIZE - 1}") as ids:
            await engine.submit(Generate(token_ids=(VOCAB_SIZE,)))
        assert ids.value.details == {"token": VOCAB_SIZE, "vocab_size": VOCAB_SIZE}


async def test_a_huge_prompt_is_refused_before_it_is_tokenized_and_delays_nobody() -> None:
    class Untouchable(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            assert len(text) < 10_000, "tokenized"
            return super().encode(text)

    async with opened(tokenizer=Untouchable()) as (engine, _):
        stream = engine.stream("hello", sampling=greedy(400))
        await anext(stream)
        begin = anyio.current_time()
        with pytest.raises(ContextLengthExceeded, match="at least 5000000"):
            await engine.submit(Generate(prompt="a" * 5_000_000))
        with pytest.raises(ContextLengthExceeded):
            await engine.submit(Generate(messages=({"role": "user", "content": "a" * 5_000_000},)))
        assert anyio.current_time() - begin < 10
        assert (await stream.result()).text == expected("hello", 400)


async def test_the_event_loop_turns_while_a_long_prompt_is_tokenized() -> None:
    class Slow(ByteTokenizer):
        longest_token = 100
        may_go = threading.Event()

        def encode(self, text: str) -> list[int]:
            if len(text) > 5000:
                assert self.may_go.wait(PATIENCE_S)
                return [97]
            return super().encode(text)

    tokenizer = Slow()
    results: list[Result] = []
    async with opened(tokenizer=tokenizer) as (engine, _):

        async def long() -> None:
            results.append(await engine.generate("a" * 6000, sampling=GREEDY))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            await until(lambda: engine._preparing)
            assert (await engine.generate("hello", sampling=GREEDY)).text == expected("hello")
            assert results == []
            tokenizer.may_go.set()
    assert results[0].text == expected("a")


async def test_more_requests_than_run_and_wait_are_refused_as_overloaded() -> None:
    runner = roomy()
    async with opened(runner, max_num_seqs=1, max_queue=2) as (engine, _):
        runner.hold()
        logs = [await engine.submit(Generate(prompt="hello", sampling=GREEDY)) for _ in range(3)]
        with pytest.raises(Overloaded, match="3 requests are running or waiting, at most 3"):
            await engine.submit(Generate(prompt="hello"))
        runner.release()
        assert [(await ended(log)).text for log in logs] == [expected("hello")] * 3


async def test_who_waits_is_told_its_position() -> None:
    runner = roomy()
    async with opened(runner, max_num_seqs=1) as (engine, _):
        runner.hold()
        logs = [await engine.submit(Generate(prompt="hello", sampling=GREEDY)) for _ in range(3)]
        assert [log.queue_position for log in logs] == [0, 1, 2]
        assert not logs[0].started
        runner.release()
        await ended(logs[0])
        assert (logs[0].started, logs[0].queue_position, logs[0].computed) == (True, None, 5)
        await ended(logs[1])
        assert logs[2].queue_position in (0, None)
        await ended(logs[2])


# ends


async def test_an_abort_ends_the_log_when_the_pages_are_free() -> None:
    async with opened() as (engine, _):
        log = await engine.submit(Generate(prompt="hello", sampling=greedy(2000)))
        engine.abort(log, "operator")
        engine.abort(log, "client")
        await ended(log)
        assert log.outcome is not None
        assert (log.outcome.finish_reason, log.outcome.cause) == ("cancelled", "operator")
        assert expected("hello", 2000).startswith(log.text)
        assert (await engine.statistics())["kv_pages_used"] == 0
        engine.abort(log)


class Leave(Exception):
    pass


@pytest.mark.parametrize("way", ["break", "raise", "scope", "close", "block", "text"])
async def test_leaving_a_stream_in_any_way_ends_it_in_the_core(way: str) -> None:
    async with opened() as (engine, _):

        async def use() -> None:
            stream = engine.stream("hello", sampling=greedy(2000))
            if way == "scope":
                with anyio.CancelScope() as scope:
                    async for _ in stream:
                        scope.cancel()
            elif way == "block":
                async with stream:
                    await anext(stream)
            elif way == "text":
                async for _ in stream.text:
                    break
            else:
                async for _ in stream:
                    if way == "break":
                        break
                    if way == "close":
                        await stream.aclose()
                        break
                    raise Leave

        with suppress(Leave):
            await use()
        await until(lambda: not len(engine._answers))
        statistics = await engine.statistics()
        assert (statistics["kv_pages_used"], statistics["engine_ended_cancelled"]) == (0, 1)


async def test_a_stream_is_cancelled_from_another_task_and_keeps_what_it_has() -> None:
    async with opened() as (engine, _):
        stream = engine.stream("hello", sampling=greedy(2000))
        results: list[Result] = []
        texts: list[str] = []

        async def read() -> None:
            async for text in stream.text:
                texts.append(text)
                if len(texts) == 3:
                    reading.set()

        reading = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await reading.wait()
            results.append(await stream.cancel())
        assert (results[0].finish_reason, results[0].cause) == ("cancelled", "client")
        assert "".join(texts) == results[0].text
        assert (await stream.result()).text == results[0].text


async def test_a_cancelled_generate_ends_in_the_core() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def cancel() -> None:
                    await until(lambda: len(engine._answers))
                    scope.cancel()

                tasks.start_soon(cancel)
                await engine.generate("hello", sampling=greedy(2000))
        await until(lambda: not len(engine._answers))
        assert (await engine.statistics())["running"] == 0


async def test_a_request_that_waits_too_long_ends_in_queue_timeout() -> None:
    runner = roomy()
    async with opened(runner, max_num_seqs=1) as (engine, _):
        runner.hold()
        first = await engine.submit(Generate(prompt="hello", sampling=greedy(2000), queue_s=1000))
        second = await engine.submit(Generate(prompt="hello", sampling=GREEDY, queue_s=0.01))
        await until(lambda: engine._answers.deadline > anyio.current_time() + 1)
        runner.release()
        await ended(second)
        assert isinstance(second.error, QueueTimeout)
        assert second.error_usage is not None and second.error_usage.completion_tokens == 0
        assert not first.ended
        engine.abort(first)
        await ended(first)
        assert expected("hello", 2000).startswith(first.text)


async def test_a_first_step_that_outlasts_the_queue_deadline_is_no_queue_timeout() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        runner.hold()
        log = await engine.submit(Generate(prompt="hello", sampling=GREEDY, queue_s=0.01))
        await until(lambda: engine._answers.deadline > anyio.current_time() + 1)  # it has passed
        runner.release()
        await ended(log)
        assert log.error is None and log.text == expected("hello", 20)


async def test_more_beams_than_there_are_tokens_are_refused() -> None:
    async with opened(max_n=300, max_num_seqs=300, max_num_batched_tokens=300) as (engine, _):
        sampling = SamplingParams(beam_width=290, n=290, max_tokens=1)
        with pytest.raises(InvalidRequest, match="at most vocab_size"):
            await engine.generate("hello", sampling=sampling)


async def test_an_answer_that_takes_too_long_is_cancelled_with_what_it_has() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        stream = engine.stream("hello", sampling=greedy(2000), total_s=0.05)
        await anext(stream)
        runner.hold()
        await until(lambda: engine._answers.deadline > anyio.current_time() + 1)
        runner.release()
        result = await stream.result()
        assert (result.finish_reason, result.cause) == ("cancelled", "timeout")
        assert result.text and expected("hello", 2000).startswith(result.text)


async def test_a_step_that_raises_ends_its_requests_and_no_others() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        runner.fail()
        with pytest.raises(EngineFailure, match="kernel panic"):
            await engine.generate("hello", sampling=GREEDY)
        assert (await engine.generate("hello", sampling=GREEDY)).text == expected("hello")


async def test_a_vocabulary_that_fails_on_an_answer_ends_that_answer_alone() -> None:
    class Fragile(ByteTokenizer):
        def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
            if ord("!") in ids:
                raise ValueError("broken vocabulary")
            return super().decode(ids)

    runner = roomy(answer=script({"bad": "ab! and so on", "good": "fine"}))
    async with opened(runner, Fragile()) as (engine, _):
        good = await engine.submit(Generate(prompt="good", sampling=GREEDY))
        with pytest.raises(EngineFailure, match="internal error"):
            await engine.generate("bad", sampling=GREEDY)
        assert (await ended(good)).text == "fine"
        assert (await engine.statistics())["running"] == 0


# the core's life


async def test_a_core_that_cannot_start_is_a_startup_error() -> None:
    def broken() -> Runner:
        raise LoadError("no such model: nonsense")

    cores = Cores(broken)
    engine = Engine(EngineConfig(), cores.connect, lambda folder: ByteTokenizer())
    with anyio.fail_after(PATIENCE_S):
        with pytest.raises(StartupError, match="no such model: nonsense"):
            async with engine:
                raise AssertionError("entered")
    assert engine.status == "failed"


@pytest.mark.parametrize("restart", [False, True])
async def test_a_core_that_dies_while_it_starts_is_a_failure_and_is_not_tried_again(restart: bool) -> None:
    def dying() -> Runner:
        cores.kill()
        return roomy()

    cores = Cores(dying)
    engine = Engine(EngineConfig(), cores.connect, lambda folder: ByteTokenizer(), restart=restart)
    with anyio.fail_after(PATIENCE_S):
        with pytest.raises(EngineFailure, match="the core died while it started"):
            async with engine:
                raise AssertionError("entered")
    assert cores.started == 1


async def test_a_killed_process_is_known_by_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[anyio.abc.Process] = []

    async def noted(*command: Any, **options: Any) -> anyio.abc.Process:
        started.append(await open_process(*command, **options))
        return started[-1]

    open_process = anyio.open_process
    monkeypatch.setattr(anyio, "open_process", noted)
    with anyio.fail_after(PATIENCE_S):
        async with core_process() as link:
            (core,) = started
            core.kill()
            with pytest.raises(LinkClosed):
                await link.receive()
            assert link.obituary is not None
            assert await link.obituary() == "killed by SIGKILL"


async def test_what_a_core_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler, for one, where the server is stopped while it still starts."""
    (tmp_path / "compiling.py").write_text(
        "import socket, subprocess, sys\n"
        "from streamengine.link import CoreLink, Progress\n"
        "link = CoreLink(socket.socket(fileno=int(sys.argv[1])))\n"
        "link.send(Progress(phase=str(subprocess.Popen(['sleep', '100']).pid)))\n"
        "link.receive(block=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def runs(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    with anyio.fail_after(PATIENCE_S):
        async with core_process("compiling") as link:
            message = await link.receive()
            assert isinstance(message, Progress)
            assert runs(message.phase)
        while runs(message.phase):  # noqa: ASYNC110 (it is not ours, so there is nothing to wait for)
            await anyio.sleep(0.01)


async def test_a_tokenizer_that_cannot_be_loaded_is_a_startup_error() -> None:
    def broken(folder: str) -> ByteTokenizer:
        raise StartupError("no tokenizer.json", param="model")

    with anyio.fail_after(PATIENCE_S):
        with pytest.raises(StartupError, match=r"no tokenizer\.json"):
            async with Engine(EngineConfig(), Cores(roomy).connect, broken):
                raise AssertionError("entered")


async def test_progress_is_told_and_the_model_is_known_when_ready() -> None:
    told: list[str] = []
    engine = Engine(
        EngineConfig(max_model_len=100),
        Cores(roomy).connect,
        lambda folder: ByteTokenizer(),
        progress=lambda progress: told.append(progress.phase),
    )
    statuses = [engine.status]
    with anyio.fail_after(PATIENCE_S):
        async with engine:
            statuses.append(engine.status)
            assert told == ["load", "warm-up"]
            assert engine.progress is not None and engine.progress.phase == "warm-up"
            assert (engine.model.max_model_len, engine.kv.page_size) == (100, 16)
            assert "kv_bytes" in engine.ledger
    assert [*statuses, engine.status] == ["starting", "ready", "closed"]
    with pytest.raises(ShuttingDown):
        await engine.submit(Generate(prompt="hello"))
    with pytest.raises(ShuttingDown):
        await engine.statistics()


async def test_an_error_in_the_block_leaves_it_as_it_is() -> None:
    async def use() -> None:
        async with opened() as (engine, _):
            engines.append(engine)
            await engine.submit(Generate(prompt="hello", sampling=greedy(2000)))
            raise Leave

    engines: list[Engine] = []
    with pytest.raises(Leave):
        await use()
    assert engines[0].status == "closed"


async def test_a_cancelled_block_takes_the_core_with_it() -> None:
    engines: list[Engine] = []
    logs: list[Log] = []
    with anyio.CancelScope() as scope:
        async with opened() as (engine, _):
            engines.append(engine)
            logs.append(await engine.submit(Generate(prompt="hello", sampling=greedy(2000))))
            scope.cancel()
            await anyio.sleep_forever()
    assert engines[0].status == "closed"
    assert logs[0].ended


async def test_leaving_the_block_ends_what_runs_as_shutdown() -> None:
    async with opened() as (engine, _):
        log = await engine.submit(Generate(prompt="hello", sampling=greedy(2000)))
    assert log.outcome is not None
    assert (log.outcome.finish_reason, log.outcome.cause) == ("cancelled", "shutdown")


async def test_the_death_of_the_core_ends_every_stream_at_once_with_its_usage() -> None:
    runner = roomy()
    async with opened(runner) as (engine, cores):
        logs = [await engine.submit(Generate(prompt=f"hello {i}", sampling=greedy(1500))) for i in range(8)]
        await until(lambda: all(len(log) > 2 for log in logs))
        cores.kill()
        for log in logs:
            await ended(log)
            assert isinstance(log.error, EngineFailure)
            assert log.error_usage is not None
            assert (log.error_usage.prompt_tokens, log.error_usage.completion_tokens) == (7, len(log))
        assert "the core died" in str(await engine.wait_failed())
        assert engine.status == "failed"
        for call in (engine.submit(Generate(prompt="a")), engine.statistics(), engine.wait_ready()):
            with pytest.raises(EngineFailure):
                await call


async def test_a_dead_core_is_started_again_if_asked() -> None:
    async with opened(restart=True) as (engine, cores):
        epoch = engine.epoch
        stream = engine.stream("hello", sampling=greedy(2000))
        await anext(stream)
        cores.kill()
        with pytest.raises(EngineFailure):
            await stream.result()
        with pytest.raises(Unavailable, match="starting"):
            await engine.submit(Generate(prompt="a"))
        assert engine.status == "starting"
        await engine.wait_ready()
        assert engine.epoch != epoch
        assert cores.started == 2
        assert (await engine.generate("hello", sampling=GREEDY)).text == expected("hello")


async def test_a_core_that_cannot_be_started_again_is_a_failure() -> None:
    runners: list[Runner] = [roomy()]
    cores = Cores(runners.pop)
    with anyio.fail_after(PATIENCE_S):
        async with Engine(EngineConfig(), cores.connect, lambda folder: ByteTokenizer(), restart=True) as engine:
            cores.kill()
            assert "could not be started again" in str(await engine.wait_failed())
            with pytest.raises(EngineFailure, match="could not be started again"):
                await engine.submit(Generate(prompt="a"))
            assert cores.started == 2


async def test_a_core_that_fails_again_and_again_ends_everything_with_its_reason() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        runner.fail(times=3)
        for _ in range(3):
            with pytest.raises(EngineFailure):
                await engine.generate("hello", sampling=GREEDY)
        assert "3 steps in a row failed" in str(await engine.wait_failed())


async def test_a_drain_refuses_new_requests_and_lets_the_running_finish() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        runner.hold()
        log = await engine.submit(Generate(prompt="hello", sampling=GREEDY))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.drain, 1000)
            await until(lambda: engine.status == "draining")
            with pytest.raises(ShuttingDown):
                await engine.submit(Generate(prompt="hello"))
            runner.release()
        assert log.outcome is not None
        assert (log.outcome.finish_reason, log.text) == ("length", expected("hello"))


async def test_a_drain_cancels_at_its_deadline() -> None:
    runner = roomy()
    async with opened(runner) as (engine, _):
        runner.hold()
        log = await engine.submit(Generate(prompt="hello", sampling=greedy(2000)))
        await until(runner.holding.is_set)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.drain, 0)
            await until(lambda: engine.status == "draining")
            runner.release()
        assert log.outcome is not None
        assert (log.outcome.finish_reason, log.outcome.cause) == ("cancelled", "shutdown")


async def test_many_ask_for_statistics_at_once() -> None:
    async with opened() as (engine, _):
        await engine.generate("hello", sampling=GREEDY)
        snapshots: list[dict[str, float]] = []

        async def ask() -> None:
            snapshots.append(await engine.statistics())

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
        assert [s["engine_ended_length"] for s in snapshots] == [1] * 5
        assert [s["generated_tokens"] for s in snapshots] == [20] * 5


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, streamengine; assert not {'torch', 'transformers'} & set(sys.modules)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
