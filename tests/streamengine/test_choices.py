"""What the engine makes of a core's deltas, with a core that says what the test tells it to."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from compiled.step import Logprob
from streamengine.config import EngineConfig
from streamengine.engine import Engine, Generate, Result
from streamengine.errors import (
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    StreamEngineError,
    UnsupportedFeature,
)
from streamengine.link import Abort, Configure, CoreLink, Deltas, FrontLink, Ready, Submit, link_pair
from streamengine.request import Delta, Finish, Request
from streamengine.sampling import SamplingParams
from tests.fakes import EOS, VOCAB_SIZE, ByteTokenizer, fake_kv, fake_model

pytestmark = pytest.mark.anyio

PATIENCE_S = 20
LENGTH = Finish("length", "max_tokens")
STOP = Finish("stop", "stop_token")


class ScriptedCore:
    """The other end of the engine's link."""

    def __init__(self) -> None:
        self._link: CoreLink
        self._mail: list[Any] = []
        self.request: Request

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[FrontLink]:
        front, back = link_pair()
        self._link = CoreLink(back)
        self._link.send(Ready(fake_model(512), fake_kv(pages=129, page_size=4), {}))
        link = await FrontLink.open(front)
        try:
            yield link
        finally:
            self.close()
            with anyio.CancelScope(shield=True):
                await link.aclose()

    async def heard(self, kind: type) -> Any:
        """The next message of this kind."""
        while True:
            while not self._mail:
                await anyio.sleep(0.001)
                self._mail += self._link.receive(block=False)
            message = self._mail.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, Configure), f"{message} before any {kind}"

    async def taken(self) -> Request:
        self.request = (await self.heard(Submit)).request
        return self.request

    def say(self, *deltas: dict[str, Any]) -> None:
        self._link.send(Deltas(tuple(Delta(request=self.request.id, **delta) for delta in deltas)))

    def close(self) -> None:
        self._link.close()


class Open:
    def __init__(self, engine: Engine, core: ScriptedCore) -> None:
        self.engine = engine
        self.core = core
        self.results: list[Result | StreamEngineError] = []

    async def generate(self, prompt: str, sampling: SamplingParams, **more: Any) -> None:
        try:
            self.results.append(await self.engine.generate(prompt, sampling=sampling, **more))
        except StreamEngineError as error:
            self.results.append(error)


@asynccontextmanager
async def opened(**config: Any) -> AsyncIterator[Open]:
    core = ScriptedCore()
    engine = Engine(EngineConfig(**config), core.connect, lambda folder: ByteTokenizer())
    with anyio.fail_after(PATIENCE_S):
        async with engine:
            try:
                yield Open(engine, core)
            finally:
                core.close()


@asynccontextmanager
async def asking(prompt: str = "hello", **sampling: Any) -> AsyncIterator[tuple[Open, ScriptedCore]]:
    """A request that the core has; its result is there afterwards."""
    async with opened() as it, anyio.create_task_group() as tasks:
        tasks.start_soon(it.generate, prompt, SamplingParams(**sampling))
        await it.core.taken()
        yield it, it.core


def only(it: Open) -> Result:
    (result,) = it.results
    assert isinstance(result, Result)
    return result


def logprobs(text: str, value: float = -0.5) -> tuple[Logprob, ...]:
    return tuple(Logprob(token=i, logprob=value, rank=1, top=((i, value), (EOS, -3.0))) for i in text.encode())


def said(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"tokens": tuple(text.encode()), "index": index, **more}


# several answers


async def test_n_answers_are_told_apart_counted_once_and_in_order() -> None:
    async with asking(n=3) as (it, core):
        assert core.request.n == 3
        core.say({"computed": 5, "queued_s": 0.0, "cached": 4})
        core.say(said("b", 1), said("a", 0), said("c", 2))
        core.say(said("B", 1, finish=LENGTH), said("C", 2), said("A", 0))
        core.say(said("A", 0, finish=LENGTH), {"tokens": (EOS,), "index": 2, "finish": STOP})
    result = only(it)
    assert [choice.text for choice in result.choices] == ["aAA", "bB", "cC"]
    assert [choice.finish_reason for choice in result.choices] == ["length", "length", "stop"]
    assert (result.text, result.usage.prompt_tokens, result.usage.completion_tokens) == ("aAA", 5, 8)
    assert (result.usage.cached_tokens, result.usage.total_tokens) == (4, 13)
    assert [choice.usage.completion_tokens for choice in result.choices] == [3, 2, 3]
    assert not result.choices[0].choices


async def test_a_stop_string_ends_one_answer_and_the_core_hears_which() -> None:
    async with asking(n=2, stop=("!",)) as (it, core):
        core.say(said("ab", 0), said("x!", 1))
        assert await core.heard(Abort) == Abort(1, "stop", 1)
        core.say(said("c", 0), said("never seen", 1))
        core.say({"index": 1, "finish": Finish("cancelled", "stop")}, said("!", 0))
        assert await core.heard(Abort) == Abort(1, "stop")
    assert [choice.text for choice in only(it).choices] == ["abc", "x"]
    assert [choice.stop_sequence for choice in only(it).choices] == ["!", "!"]


async def test_best_of_gives_the_likeliest_on_average_and_counts_all_that_were_drawn() -> None:
    async with asking(best_of=3, n=2) as (it, core):
        assert (core.request.n, core.request.sampling.logprobs) == (3, 0)
        core.say(
            said("long and unlikely", 0, finish=LENGTH, logprobs=logprobs("long and unlikely", -2.0)),
            said("b", 1, finish=LENGTH, logprobs=logprobs("b", -1.0)),
            said("best", 2, finish=LENGTH, logprobs=logprobs("best", -0.5)),
        )
    result = only(it)
    assert [choice.text for choice in result.choices] == ["best", "b"]
    assert (result.text, result.usage.completion_tokens, result.logprobs) == ("best", 22, ())


async def test_beams_arrive_at_the_end_best_first_with_their_scores() -> None:
    async with asking(beam_width=3, n=2, length_penalty=0.5) as (it, core):
        request = core.request
        assert (request.n, request.beam_width, request.length_penalty, request.speculate) == (2, 3, 0.5, 0)
        core.say({"computed": 5, "queued_s": 0.0})
        core.say(said("ab", 0, finish=LENGTH, beam_score=-1.5), said("ac", 1, finish=LENGTH, beam_score=-2.0))
    assert [(choice.text, choice.beam_score) for choice in only(it).choices] == [("ab", -1.5), ("ac", -2.0)]


async def test_aborting_one_answers_log_ends_the_request_with_all_its_answers() -> None:
    async with opened() as it:
        logs = await it.engine.submit_all(Generate(prompt="hello", sampling=SamplingParams(n=3)))
        await it.core.taken()
        it.core.say(said("a", 0), said("b", 1, finish=LENGTH))
        it.engine.abort(logs[1], "operator")
        assert await it.core.heard(Abort) == Abort(1, "operator")
        # One delta for the whole request or one for each answer: both are understood.
        it.core.say({"index": 0, "finish": Finish("cancelled", "operator")})
        await until(lambda: all(log.ended for log in logs))
        causes = [log.outcome and (log.outcome.finish_reason, log.outcome.cause) for log in logs]
        assert causes == [("cancelled", "operator"), ("length", None), ("cancelled", "operator")]
        assert [log.text for log in logs] == ["a", "b", ""]
        assert len(it.engine._answers) == 0


async def test_a_cancelled_generate_of_several_answers_ends_in_the_core() -> None:
    async with opened() as it:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(it.generate, "hello", SamplingParams(n=2))
                await it.core.taken()
                scope.cancel()
        assert await it.core.heard(Abort) == Abort(1, "client")
        it.core.say(*({"index": i, "finish": Finish("cancelled", "client")} for i in range(2)))
        await until(lambda: not len(it.engine._answers))


async def test_a_step_that_fails_fails_every_answer_of_its_request_with_the_same_error() -> None:
    async with asking(n=2) as (it, core):
        core.say(said("a", 0), said("b", 1))
        core.say({"index": 0, "finish": Finish("error", "engine_error", "kernel panic")})
    (error,) = it.results
    assert isinstance(error, EngineFailure) and "kernel panic" in error.message


async def test_a_deadline_aborts_the_request_once_for_all_its_answers() -> None:
    async with opened() as it, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(it.generate, "hello", SamplingParams(n=4), total_s=0.01))
        await it.core.taken()
        assert await it.core.heard(Abort) == Abort(1, "timeout")
        it.core.say(*({"index": i, "finish": Finish("cancelled", "timeout")} for i in range(4)))
    assert {choice.cause for choice in only(it).choices} == {"timeout"}


async def test_several_answers_cannot_be_streamed_and_are_refused_by_name() -> None:
    async with opened() as it:
        for field, sampling in (("n", SamplingParams(n=2)), ("best_of", SamplingParams(best_of=2))):
            with pytest.raises(UnsupportedFeature, match="use generate") as caught:
                await anext(it.engine.stream("hello", sampling=sampling))
            assert caught.value.param == field


# log-probabilities


async def test_log_probabilities_come_with_their_tokens_spelt_out() -> None:
    async with opened() as it:
        stream = it.engine.stream("hi", sampling=SamplingParams(logprobs=2, prompt_logprobs=1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.core.taken)
            await stream.__aenter__()
        request = it.core.request
        assert (request.sampling.logprobs, request.prompt_logprobs) == (2, 1)
        it.core.say({"computed": 1, "queued_s": 0.0, "prompt_logprobs": logprobs("i")})
        it.core.say(said("é", logprobs=logprobs("é")))
        delta = await anext(stream)
        assert [(item.token, item.text, item.bytes) for item in delta.logprobs] == [
            (0xC3, "\ufffd", b"\xc3"),
            (0xA9, "\ufffd", b"\xa9"),
        ]
        first = delta.logprobs[0]
        assert (first.logprob, first.rank) == (-0.5, 1)
        assert [(top.token, top.text, top.rank, top.logprob) for top in first.top] == [
            (0xC3, "\ufffd", 1, -0.5),
            (EOS, "", 2, -3.0),
        ]
        it.core.say(said("!", finish=LENGTH, logprobs=logprobs("!", 1e-7)))
        result = await stream.result()
        assert [item.token for item in result.logprobs] == list(result.token_ids)
        assert result.logprobs[-1].logprob == 0.0
        assert [item.text for item in result.prompt_logprobs] == ["i"]


async def test_text_ids_and_log_probabilities_are_cut_at_the_same_token() -> None:
    """One step may bring several tokens, and a stop string may end among them."""
    async with asking(stop=("END",), logprobs=0) as (it, core):
        core.say(said("one EN", logprobs=logprobs("one EN")))
        core.say(said("D two three", logprobs=logprobs("D two three")))
        assert await core.heard(Abort) == Abort(1, "stop")
    result = only(it)
    assert (result.text, bytes(result.token_ids)) == ("one ", b"one END")
    assert [item.token for item in result.logprobs] == list(b"one END")
    assert result.usage.completion_tokens == 7


async def test_a_token_without_its_log_probability_ends_that_answer_alone() -> None:
    async with asking(logprobs=1) as (it, core):
        core.say(said("ab", logprobs=logprobs("a")))
    (error,) = it.results
    assert isinstance(error, EngineFailure)


# ends


@pytest.mark.parametrize(
    ("sampling", "deltas", "text", "reason"),
    [
        ({"stop": ("b",)}, [said("a"), {"tokens": (EOS,), "finish": STOP}], "a", "stop"),
        ({"stop": ("b",)}, [said("ab", finish=LENGTH)], "a", "stop"),
        ({"stop": ("b",)}, [{"tokens": (*b"ab", EOS), "finish": STOP}], "a", "stop"),
        ({"stop": ("b",), "min_tokens": 3}, [said("ab"), said("cb")], "abc", "stop"),
        ({"stop": ("b",), "min_tokens": 9, "max_tokens": 9}, [said("ab"), said("c", finish=LENGTH)], "abc", "length"),
        ({"stop": ("b",), "include_stop_str_in_output": True}, [said("abc")], "ab", "stop"),
        ({"stop_token_ids": (98,)}, [said("ab", finish=STOP)], "a", "stop"),
        ({"stop_token_ids": (98,), "include_stop_str_in_output": True}, [said("ab", finish=STOP)], "ab", "stop"),
    ],
    ids=[
        "a stop token",
        "a stop string before the length",
        "an earlier stop string before a stop token",
        "no stop string before min_tokens",
        "min_tokens up to the length",
        "the stop string is kept",
        "the stop token has no text",
        "the stop token is kept",
    ],
)
async def test_the_precedence_of_ends(sampling: Any, deltas: list[Any], text: str, reason: str) -> None:
    async with asking(**sampling) as (it, core):
        core.say(*deltas)
    assert (only(it).text, only(it).finish_reason) == (text, reason)


async def test_stop_tokens_are_barred_by_the_sampler_until_min_tokens_are_there() -> None:
    async with asking(min_tokens=3, stop_token_ids=(98,)) as (_, core):
        assert core.request.sampling.barred_token_ids == (98, EOS)
        assert core.request.sampling.min_tokens == 3
        core.say(said("a", finish=LENGTH))


# what the core is told


async def test_bad_words_are_barred_at_the_beginning_and_behind_a_space() -> None:
    async with asking(bad_words=("no", " yes", "\n", (1, 2), "no")) as (_, core):
        texts = [bytes(word) for word in core.request.sampling.bad_words]
        assert texts == [b"no", b" no", b"yes", b" yes", b"\n", b"\x01\x02"]
        core.say(said("a", finish=LENGTH))


async def test_tenant_priority_and_the_engines_own_speculation_reach_the_core() -> None:
    async with opened(speculate_tokens=3) as it, anyio.create_task_group() as tasks:
        plain, history = SamplingParams(), SamplingParams(presence_penalty=1.0)
        for sampling, speculate in ((plain, 3), (history, 0), (SamplingParams(speculate=0), 0)):
            tasks.start_soon(partial(it.generate, "a", sampling, tenant="me", priority=-5))
            request = await it.core.taken()
            assert (request.tenant, request.priority, request.speculate) == ("me", -5, speculate)
            it.core.say(said("a", finish=LENGTH))


@pytest.mark.parametrize(
    ("n", "prompt", "room"),
    # 128 pages of 4 tokens; the last token of an answer is never written.
    [(1, 5, 507), (2, 5, 63 * 4), (4, 8, 31 * 4 - 3), (16, 4, 8 * 4 - 3)],
)
async def test_answers_of_no_given_length_may_together_fill_the_cache(n: int, prompt: int, room: int) -> None:
    async with asking("a" * prompt, n=n) as (_, core):
        assert core.request.max_tokens == room
        core.say(*({"index": i, "finish": LENGTH} for i in range(n)))


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"n": 17}, InvalidRequest, "n"),
        ({"n": 10**9}, InvalidRequest, "n"),
        ({"best_of": 10**6}, InvalidRequest, "best_of"),
        ({"beam_width": 17}, InvalidRequest, "beam_width"),
        ({"logit_bias": {VOCAB_SIZE: 1}}, InvalidRequest, "logit_bias"),
        ({"logit_bias": {"999999": 5}}, InvalidRequest, "logit_bias"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, InvalidRequest, "allowed_token_ids"),
        ({"bad_words": ((VOCAB_SIZE,),)}, InvalidRequest, "bad_words"),
        ({"bad_words": ("\ud800",)}, InvalidRequest, "bad_words"),
        ({"allowed_token_ids": (5,), "bad_words": ((1, 5),)}, InvalidRequest, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, InvalidRequest, "allowed_token_ids"),
        ({"speculate": 2, "repetition_penalty": 1.5}, UnsupportedFeature, "speculate"),
        ({"speculate": 2, "min_tokens": 1}, UnsupportedFeature, "speculate"),
        ({"min_tokens": 600}, ContextLengthExceeded, "min_tokens"),
    ],
)
async def test_what_no_core_could_do_is_refused_by_the_name_of_the_field(
    asked: dict[str, Any], kind: type[StreamEngineError], param: str
) -> None:
    async with opened() as it:
        with pytest.raises(kind) as caught:
            await it.engine.generate("hello", sampling=SamplingParams(**asked))
        assert caught.value.param == param


async def test_more_answers_than_run_at_once_or_fit_the_cache_are_refused() -> None:
    async with opened(max_num_seqs=4, max_num_batched_tokens=4) as it:
        with pytest.raises(InvalidRequest, match="n must be at most max_num_seqs 4, not 5"):
            await it.engine.generate("hello", sampling=SamplingParams(n=5))
    async with opened() as it:
        with pytest.raises(ContextLengthExceeded, match="room for 0 tokens in each of 16 answers") as caught:
            await it.engine.generate("a" * 509, sampling=SamplingParams(n=16))
        assert caught.value.param == "n"


async def test_log_probabilities_of_a_long_prompt_are_limited_by_their_bytes() -> None:
    async with opened() as it:
        intake = it.engine.intake
        intake.limit = 100_000
        with pytest.raises(InvalidRequest, match="need 42000000 bytes, at most 33554432") as caught:
            await it.engine.generate(token_ids=[1] * 10_000, sampling=SamplingParams(prompt_logprobs=20))
        assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 1.5), ("priority", True), ("priority", 101), ("tenant", 5), ("tenant", "x" * 257), ("tenant", None)],
)
async def test_a_tenant_and_a_priority_are_checked(field: str, value: object) -> None:
    async with opened() as it:
        with pytest.raises(InvalidRequest) as caught:
            await it.engine.submit(Generate(prompt="hello", **{field: value}))  # type: ignore[arg-type]
        assert caught.value.param == field


async def until(condition: Callable[[], object]) -> None:
    """For what no event tells. Bounded by the test's own patience."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.001)
