"""Two cores, one that computes prompts and one that answers, over real sockets and shared memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from compiled.step import Sampling
from streamengine.config import EngineConfig, TransferConfig
from streamengine.errors import StartupError
from streamengine.guided.grammar import Grammar
from streamengine.link import Abort, Submit
from streamengine.request import Delta, Finish, Request
from tests.fakes import EOS, GREEDY, FakeRunner, byte_tokenizer_json, fake_kv, fake_model, formula, oracle
from tests.streamengine.test_core import WAIT_S, Front, core

PROMPT = tuple(range(40, 67))
"""27 tokens: six full pages and one that is not."""


def decoding(tmp_path: Path, **more: Any) -> EngineConfig:
    transfer = TransferConfig(role="decode", peers=(f"unix:{tmp_path}/p",), **{"prefill_threshold": 8} | more)
    return EngineConfig(max_num_seqs=8, transfer=transfer, debug=True)


def prefilling(tmp_path: Path, **more: Any) -> EngineConfig:
    transfer = TransferConfig(role="prefill", listen=f"unix:{tmp_path}/p")
    return EngineConfig(max_num_seqs=8, transfer=transfer, debug=True, **more)


def runner(**more: Any) -> FakeRunner:
    return FakeRunner(shared=True, **more)


@contextmanager
def split(tmp_path: Path, build: Callable[[], FakeRunner] = runner, **more: Any) -> Iterator[tuple[Front, Front]]:
    """The engine that answers and the one that computes prompts, connected."""
    with core(build(), prefilling(tmp_path)) as prefill, core(build(), decoding(tmp_path, **more)) as decode:
        until(decode, "remote_peers", 1)
        yield decode, prefill


def until(front: Front, name: str, value: float) -> None:
    for _ in range(2000):
        if front.statistics().get(name) == value:
            return
        threading.Event().wait(0.005)
    raise AssertionError(f"{name} is {front.statistics().get(name)}, not {value}")


def request(id: int = 1, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6, **more: Any) -> Request:
    return Request(id=id, prompt=prompt, max_tokens=max_tokens, **{"sampling": GREEDY} | more)


def test_a_prompt_is_computed_by_the_peer_and_the_answer_goes_on_with_its_pages(tmp_path: Path) -> None:
    with split(tmp_path) as (decode, prefill):
        decode.send(Submit(request()))
        ((tokens, finish),) = decode.finish(1).values()
        assert tokens == oracle(PROMPT, 6) and finish.reason == "length"
        here, there = decode.statistics(), prefill.statistics()
        assert (here["remote_landed"], here["prompt_tokens"], here["remote_waiting"]) == (1, 0, 0)
        assert there["prompt_tokens"] == len(PROMPT)
        until(prefill, "prefills_held", 0)
        assert prefill.statistics()["kv_pages_used"] == 0 == decode.statistics()["kv_pages_used"]


CASES: dict[str, dict[str, Any]] = {
    "one token": {"max_tokens": 1},
    "a stop at the first token": {"stop_token_ids": (formula(PROMPT, GREEDY),)},
    "a stop at the third token": {"stop_token_ids": (oracle(PROMPT, 3)[-1],)},
    "seeded": {"sampling": Sampling(temperature=1.0, seed=7)},
    "three answers": {"n": 3, "sampling": Sampling(temperature=1.0, seed=7)},
    "log-probabilities": {"sampling": Sampling(logprobs=2)},
    "penalties": {"sampling": Sampling(presence_penalty=1.0, repetition_penalty=1.3)},
    "guesses": {"speculate": 3, "max_tokens": 12},
    "beams": {"beam_width": 2, "n": 2},
    "a page to the token": {"prompt": PROMPT[:24]},
    "a tenant": {"tenant": "a"},
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_an_answer_is_the_same_as_of_one_engine(tmp_path: Path, case: dict[str, Any], depth: int) -> None:
    build = partial(runner, depth=depth)
    asked = [request(1, **case), request(2, **case)]
    with core(build(), EngineConfig(max_num_seqs=8)) as alone:
        expected = [answers_of(alone, one) for one in asked]
    with split(tmp_path, build) as (decode, _):
        assert [answers_of(decode, one) for one in asked] == expected
        # The second one finds the pages of the first here, if they were needed.
        over = len(expected[0]) == 1 and len(expected[0][0][0]) == 1
        assert decode.statistics()["remote_sent"] == 1 + over


def answers_of(front: Front, asked: Request) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities, score and end of each answer."""
    front.send(Submit(asked))
    found: list[list[Delta]] = [[] for _ in range(asked.n)]
    while not all(deltas and deltas[-1].finish for deltas in found):
        for delta in front.deltas():
            assert delta.request == asked.id
            found[delta.index].append(delta)
    return [
        (
            [token for delta in deltas for token in delta.tokens],
            [one for delta in deltas for one in delta.logprobs],
            deltas[-1].beam_score,
            deltas[-1].finish,
        )
        for deltas in found
    ]


def test_a_prompt_below_the_threshold_and_one_that_is_scored_are_computed_here(tmp_path: Path) -> None:
    with split(tmp_path, prefill_threshold=28) as (decode, prefill):
        answers_of(decode, request(1))
        answers_of(decode, request(2, (*PROMPT, 9), prompt_logprobs=0))
        answers_of(decode, request(3, (*PROMPT, 9, 9), answered=(formula((*PROMPT, 9, 9), GREEDY),)))
        assert decode.statistics()["remote_sent"] == 0 == prefill.statistics()["steps"]


def test_a_guided_answer_begins_there_and_goes_on_here(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    build = partial(runner, model=fake_model(folder=str(tmp_path)))
    grammar = Grammar(kind="regex", text="(yes|no), [a-z]{4}!", close=True)
    asked = request(1, grammar=grammar, max_tokens=20, stop_token_ids=(EOS,))
    with core(build(), EngineConfig(max_num_seqs=8)) as alone:
        expected = answers_of(alone, asked)
    with split(tmp_path, build) as (decode, _):
        assert answers_of(decode, asked) == expected
        assert decode.statistics()["remote_landed"] == 1
    assert bytes(expected[0][0]).decode().endswith("!")


def test_a_long_prompt_goes_in_by_chunks_there_and_prefixes_are_found_on_both_sides(tmp_path: Path) -> None:
    long = tuple(range(100))
    like = (*long[:40], *range(200, 240))
    pool = fake_kv(129)
    with (
        core(runner(kv=pool), structs.replace(prefilling(tmp_path), max_num_batched_tokens=8)) as prefill,
        core(runner(kv=pool), decoding(tmp_path)) as decode,
    ):
        until(decode, "remote_peers", 1)
        for id, prompt in enumerate((long, like), 1):
            assert answers_of(decode, request(id, prompt))[0][0] == oracle(prompt, 6)
        here, there = decode.statistics(), prefill.statistics()
        assert there["prefix_hits"] == 40 and there["steps"] > 14
        # What is cached here is not moved again: 25 pages, and then 20 but for 10.
        assert here["remote_bytes"] == (25 + 20 - 10) * pool.page_bytes


def test_a_prompt_that_is_longer_than_what_transfers_may_hold_is_computed_here(tmp_path: Path) -> None:
    with split(tmp_path) as (decode, _):
        assert answers_of(decode, request(1, tuple(range(65))))[0][0] == oracle(tuple(range(65)), 6)
        assert decode.statistics()["remote_too_long"] == 1


def test_without_a_peer_a_prompt_is_computed_here_or_refused_as_was_asked_for(tmp_path: Path) -> None:
    with core(runner(), decoding(tmp_path)) as alone:
        assert answers_of(alone, request())[0][0] == oracle(PROMPT, 6)
        assert alone.statistics()["remote_fallbacks_no_peer"] == 1
    with core(runner(), decoding(tmp_path, on_load_failure="fail")) as alone:
        ((tokens, _, _, finish),) = answers_of(alone, request())
        assert (tokens, finish.reason, finish.cause) == ([], "error", "engine_error")
        assert "no engine for prefills is connected" in finish.message


def test_a_peer_with_another_page_size_is_told_apart_by_both_values(tmp_path: Path, caplog: Any) -> None:
    with core(runner(kv=fake_kv(page_size=8)), prefilling(tmp_path)) as prefill:
        with core(runner(), decoding(tmp_path)) as decode:
            until(decode, "remote_mismatches", 1)
            assert answers_of(decode, request())[0][0] == oracle(PROMPT, 6)
            assert decode.statistics()["remote_peers"] == 0
        assert prefill.statistics()["prefills_received"] == 0
    assert "page_size here 4, there 8" in caplog.text and "page_size here 8, there 4" in caplog.text


def test_a_request_that_is_aborted_while_the_peer_computes_leaves_nothing_behind(tmp_path: Path) -> None:
    slow = runner()
    with core(slow, prefilling(tmp_path)) as prefill, core(runner(), decoding(tmp_path)) as decode:
        until(decode, "remote_peers", 1)
        slow.hold()
        decode.send(Submit(request()))
        assert slow.holding.wait(WAIT_S)
        decode.send(Abort(1, "client"))
        assert decode.finish(1) == {1: ([], Finish("cancelled", "client"))}
        slow.release()
        until(prefill, "prefills_waiting", 0)
        for front in (decode, prefill):
            until(front, "kv_pages_used", 0)


def test_a_peer_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    slow = runner()
    config = decoding(tmp_path, transfer_deadline_s=0.2)
    with core(slow, prefilling(tmp_path)) as prefill, core(runner(), config) as decode:
        until(decode, "remote_peers", 1)
        slow.hold()
        assert answers_of(decode, request())[0][0] == oracle(PROMPT, 6)
        assert decode.statistics()["remote_fallbacks_deadline"] == 1
        slow.release()
        until(prefill, "kv_pages_used", 0)


def test_an_engine_for_prefills_needs_an_address(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="role prefill needs listen"):
        TransferConfig(role="prefill")
    with pytest.raises(StartupError, match="role decode needs peers"):
        TransferConfig(role="decode", listen="unix:/x")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("somewhere", "neither unix:PATH nor HOST:PORT"),
        ("unix:", "neither unix:PATH nor HOST:PORT"),
        ("host:99999", "has port 99999, at most 65535"),
        ("unix:" + "ä" * 54, "a path of 108 bytes, sockets take at most 107"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_anything_is_loaded(address: str, why: str) -> None:
    for wrong in ({"role": "prefill", "listen": address}, {"role": "decode", "peers": ["unix:/x", address]}):
        with pytest.raises(StartupError, match=why) as refused:
            msgspec.convert(wrong, TransferConfig)
        assert refused.value.param in wrong
