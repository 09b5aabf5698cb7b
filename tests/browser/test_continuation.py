"""An answer of the browser client whose server is gone: another one, played or real, goes on with it."""

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from compiled.step import Sampling
from tests.browser.test_client import ACCEPTED, HELLO, STREAM_ID, PlayedServer, delta, done, played, site
from tests.browser.test_reconnect import Cutter, paced, tab
from tests.fakes import fake_model, oracle
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving

__all__ = ["played", "site"]  # fixtures

pytestmark = pytest.mark.browser

TEXTS = ["H", "é", "", "京", "!"]
ANOTHER = {**ACCEPTED, "stream": "st_another_server_s1"}
CUT = {"finish_reason": "cancelled", "cause": "shutdown"}
FULL = {"type": "error", "code": "overloaded", "message": "full", "status": 503, "retryable": True}
REFUSED = {"type": "error", "code": "invalid_request", "message": "no", "status": 400, "retryable": False}
NOT_FOUND = {"type": "error", "code": "stream_not_found", "message": "gone", "status": 404, "retryable": False}


def deltas(after: int, to: int = len(TEXTS)) -> list[dict[str, Any]]:
    """Tokens ``after + 1`` to ``to``; the id of token i is i."""
    return [delta(seq, TEXTS[seq - 1], tokens=[seq]) for seq in range(after + 1, to + 1)]


def rest(after: int) -> list[Any]:
    """What another server says that goes on behind ``after``."""
    return [{**ANOTHER, "after": after}, *deltas(after), done(len(TEXTS) + 1, "".join(TEXTS))]


def text_of(seen: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in seen if event["type"] == "delta")


@pytest.mark.parametrize("place", range(len(TEXTS) + 1))
def test_cut_behind_any_token_the_answer_goes_on_at_another_server(played: PlayedServer, place: int) -> None:
    seen = played.play([[ACCEPTED, *deltas(0, place), "f", 1012], rest(place)], "run({ prompt: 'hi', top_k: 5 })")
    assert [event["text"] for event in seen if event["type"] == "delta"] == TEXTS
    assert [event["after"] for event in seen if event["type"] == "accepted"] == [0, place]
    assert seen[-1]["type"] == "done"
    assert all("tokens" not in event for event in seen)
    first, second = played.sent("generate")
    assert played.sent("attach") == []
    assert first["delivery"]["token_ids"] is True and "continues" not in first
    same = {"id", "prompt", "top_k", "seed", "delivery"}
    assert {name: first[name] for name in same} == {name: second[name] for name in same}
    if place:
        assert second["continues"] == list(range(1, place + 1))
    assert (second["key"] == first["key"]) == (place == 0)


@pytest.mark.parametrize("place", [1, 3])
def test_what_has_come_and_nobody_has_read_is_not_lost(played: PlayedServer, place: int) -> None:
    """It is not asked for again either, where the next server's connection breaks too."""
    broken = [*rest(place)[:2], 1012]
    again = [{**ANOTHER, "after": place}, *rest(place)[1:]]
    played.scripts = [[ACCEPTED, *deltas(0, place), "f", 1012], broken, again]
    played.page.evaluate("window.stream = client.stream({ prompt: 'hi' }), undefined")
    eventually(lambda: len(played.sent("attach")) == 1)
    result = played.page.evaluate("stream.result()")
    assert (result["text"], result["continued"]) == ("".join(TEXTS), 1)
    (attach,) = played.sent("attach")
    assert (attach["stream"], attach["after"]) == (ANOTHER["stream"], place)


def read_later(played: PlayedServer, scripts: list[Any], type: str, count: int, options: str = "{}") -> Any:
    """Take nothing of a stream before the client has sent so many messages of ``type``; then all, seen as by `run`."""
    played.scripts = scripts
    played.page.evaluate(f"window.later = new StreamEngine(undefined, {options}).stream({{ prompt: 'hi' }}), undefined")
    eventually(lambda: len(played.sent(type)) == count)
    return played.page.evaluate("watch(later)")


def test_what_comes_twice_as_it_was_not_read_is_sent_on_once(played: PlayedServer) -> None:
    scripts = [[ACCEPTED, *deltas(0, 2), 1012], [ACCEPTED, *deltas(0, 2), "f", 1012], rest(2)]
    assert text_of(read_later(played, scripts, "generate", 2)) == "".join(TEXTS)
    assert played.sent("attach")[0]["after"] == 0
    assert played.sent("generate")[1]["continues"] == [1, 2]


def test_an_answer_that_was_continued_is_not_begun_again(played: PlayedServer) -> None:
    scripts = [[ACCEPTED, *deltas(0, 1), "f", 1012], [*rest(1)[:2], "g", 1012]]
    seen = read_later(played, scripts, "init", 3, "{ continuations: 1 }")
    assert (seen[-1]["code"], seen[-1]["partial"]["text"]) == ("stream_lost", "Hé")
    assert len(played.sent("generate")) == 2


def test_a_server_that_does_not_know_the_stream_any_more_continues_it(played: PlayedServer) -> None:
    seen = played.play([[ACCEPTED, *deltas(0, 2), 1012], [NOT_FOUND], rest(2)], "run({ prompt: 'hi' })")
    assert text_of(seen) == "".join(TEXTS)
    assert [len(played.sent(type)) for type in ("generate", "attach")] == [2, 1]
    assert len(played.sockets) == 2


def test_a_continuation_that_is_lost_before_it_is_accepted_is_repeated_with_its_key(played: PlayedServer) -> None:
    scripts = [[ACCEPTED, *deltas(0, 2), "f", 1012], ["g", 1012], rest(2)]
    assert played.play(scripts, "client.stream({ prompt: 'hi' }).result()")["continued"] == 1
    _, second, third = played.sent("generate")
    assert second == third


def test_three_servers_may_continue_an_answer_unless_more_is_wished(played: PlayedServer) -> None:
    scripts = [
        [{**ACCEPTED, "after": n, "stream": f"{STREAM_ID}{n}"}, *deltas(n, n + 1), f"f{n}", 1012] for n in range(4)
    ]
    thrown = played.play([*scripts, rest(4)], "run({ prompt: 'hi' })")[-1]
    assert (thrown["code"], thrown["partial"]) == (
        "stream_lost",
        {"text": "".join(TEXTS[:4]), "reasoning": "", "continued": 3},
    )
    more = "watch(new StreamEngine(undefined, { continuations: 4 }).stream({ prompt: 'hi' }))"
    assert text_of(played.play([*scripts, rest(4)], more)) == "".join(TEXTS)


@pytest.mark.parametrize("end", [["f", 1012], [done(3, "Hé", **CUT)]])
def test_without_continuations_nothing_is_asked_for_and_nothing_continued(played: PlayedServer, end: list[Any]) -> None:
    off = "watch(new StreamEngine(undefined, { continuations: 0 }).stream({ prompt: 'hi' }))"
    bare = [{name: value for name, value in event.items() if name != "tokens"} for event in deltas(0, 2)]
    last = played.play([[ACCEPTED, *bare, *end]], off)[-1]
    (asked,) = played.sent("generate")
    assert "seed" not in asked and "token_ids" not in asked["delivery"]
    assert last.get("cause") == "shutdown" or (last["code"], last["partial"]["text"]) == ("stream_lost", "Hé")


def test_a_stream_that_another_page_began_is_lost_with_its_server(played: PlayedServer) -> None:
    script = [{**ACCEPTED, "after": 1}, *deltas(1, 2), "f", 1012]
    seen = played.play([script], f"watch(client.resume({{ stream: '{STREAM_ID}', seq: 1 }}))")
    assert (seen[-1]["code"], seen[-1]["partial"]["text"]) == ("stream_lost", "é")
    assert played.sent("generate") == []
    assert "token_ids" not in played.sent("attach")[0]["delivery"]


def test_a_server_that_tells_no_ids_cannot_be_left(played: PlayedServer) -> None:
    seen = played.play([[ACCEPTED, delta(1, "a"), "f", 1012]], "run({ prompt: 'hi' })")
    assert (seen[-1]["code"], seen[-1]["partial"]["text"]) == ("stream_lost", "a")
    assert len(played.sent("generate")) == 1


@pytest.mark.parametrize("refusal", [FULL, REFUSED])
def test_a_continuation_that_is_refused_ends_the_stream_with_what_came(
    played: PlayedServer, refusal: dict[str, Any]
) -> None:
    thrown = played.play([[ACCEPTED, *deltas(0, 2), "f", 1012], [refusal]], "run({ prompt: 'hi' })")[-1]
    assert (thrown["code"], thrown["partial"]["text"]) == (refusal["code"], "Hé")


def test_streams_that_one_loss_ends_have_each_their_own_partial(played: PlayedServer) -> None:
    scripts: list[Any] = [[ACCEPTED, *deltas(0, 1)], [ACCEPTED, *deltas(0, 2), 1000]]
    first, second = played.play(scripts, "Promise.all([run({ prompt: 'a' }), run({ prompt: 'b' })])")
    assert [seen[-1]["partial"]["text"] for seen in (first, second)] == ["H", "Hé"]


def test_the_seed_is_the_callers_or_that_of_the_key(played: PlayedServer) -> None:
    """A key that is used again stands for the same request, so it must not be drawn."""
    whole = [ACCEPTED, *rest(0)[1:]]
    for request in ({"seed": 7}, {"key": "12345678"}, {"key": "12345678"}, {}, {}):
        played.run(*whole, **request)
    own, first, again, *drawn = [message["seed"] for message in played.sent("generate")]
    assert own == 7 and first == again == zlib.crc32(b"12345678")
    assert len({first, *drawn}) == 3


def test_ids_are_shown_to_whoever_asked_for_them(played: PlayedServer) -> None:
    scripts = [[ACCEPTED, *deltas(0, 2), "f", 1012], rest(2)]
    seen = played.play(scripts, "run({ prompt: 'hi', delivery: { token_ids: true } })")
    assert [event["tokens"] for event in seen if event["type"] == "delta"] == [[1], [2], [3], [4], [5]]


def test_a_value_that_comes_again_with_its_delta_is_told_once(played: PlayedServer) -> None:
    value = {"type": "value", "seq": 2, "path": "/a", "value": 1}
    scripts = [[ACCEPTED, *deltas(0, 1), value, "f", 1012], [*rest(1)[:1], value, *rest(1)[1:]]]
    seen = played.play(scripts, "run({ prompt: 'hi' })")
    assert [event["path"] for event in seen if event["type"] == "value"] == ["/a"]
    assert text_of(seen) == "".join(TEXTS)


@pytest.mark.parametrize("place", [0, 2])
def test_what_a_shutdown_cut_goes_on_at_another_server(played: PlayedServer, place: int) -> None:
    cut = done(place + 1, "".join(TEXTS[:place]), **CUT)
    seen = played.play([[ACCEPTED, *deltas(0, place), cut, "f", 1012], rest(place)], "run({ prompt: 'hi' })")
    assert [event["text"] for event in seen if event["type"] == "delta"] == TEXTS
    assert [event.get("finish_reason") for event in seen if event["type"] == "done"] == ["stop"]


def begin_cut(played: PlayedServer, *end: Any, then: list[list[Any]]) -> None:
    """``one`` is a stream that was cut behind two tokens, in a page whose clock stands still."""
    played.page.clock.install()
    played.page.clock.pause_at(2_000_000_000)
    played.scripts = [[ACCEPTED, *deltas(0, 2), done(3, "Hé", **CUT), *end], *then]
    played.page.evaluate("window.stream = client.stream({ prompt: 'hi' }), undefined")
    played.page.evaluate("window.one = watch(stream).then((seen) => (window.ended = seen)), undefined")
    eventually(lambda: played.page.evaluate("stream.position.seq") == 2)
    if end:
        wait_for_loss(played)


def wait_for_loss(played: PlayedServer) -> None:
    eventually(lambda: played.page.evaluate("client.state") == "waiting")


@pytest.mark.parametrize("end", [(), ("f", 1012)])
def test_what_a_shutdown_cut_ends_so_where_no_server_takes_it_within_five_seconds(
    played: PlayedServer, end: tuple[Any, ...]
) -> None:
    begin_cut(played, *end, then=[[]])
    played.page.clock.run_for(4_900)
    assert played.page.evaluate("window.ended") is None
    eventually(lambda: len(played.sent("generate")) == 1 + bool(end))
    played.page.clock.run_for(200)
    seen = played.page.evaluate("one")
    assert (text_of(seen), seen[-1]["cause"]) == ("Hé", "shutdown")
    eventually(lambda: len(played.sent("cancel")) == 1)


def test_what_a_shutdown_cut_ends_so_where_the_next_server_refuses_it(played: PlayedServer) -> None:
    seen = played.play([[ACCEPTED, *deltas(0, 2), done(3, "Hé", **CUT), "f", 1012], [FULL]], "run({ prompt: 'hi' })")
    assert (text_of(seen), seen[-1]["cause"]) == ("Hé", "shutdown")


@pytest.mark.parametrize("how", ["stream.cancel()", "client.close()"])
def test_whoever_waits_no_longer_has_the_end_that_the_shutdown_made(played: PlayedServer, how: str) -> None:
    begin_cut(played, then=[[]])
    played.page.evaluate(how)
    assert played.page.evaluate("one")[-1]["cause"] == "shutdown"


def test_a_cut_that_was_taken_over_does_not_end_later(played: PlayedServer) -> None:
    """Told of twice, by two connections to the server that was shut down."""
    again = [{**ACCEPTED, "after": 2}, done(3, "Hé", **CUT), "f", 1012]
    begin_cut(played, 1012, then=[again, rest(2)[:2]])
    played.page.clock.run_for(1_000)
    eventually(lambda: len(played.sent("attach")) == 1)
    wait_for_loss(played)
    played.page.clock.run_for(1_000)
    eventually(lambda: played.page.evaluate("stream.position.seq") == 3)
    played.page.clock.run_for(10_000)
    assert played.page.evaluate("window.ended") is None
    assert played.sent("cancel") == []


def test_what_a_shutdown_cut_is_whole_for_whoever_reads_it_late(played: PlayedServer) -> None:
    seen = read_later(played, [[ACCEPTED, *deltas(0, 2), done(3, "Hé", **CUT), 1012], [REFUSED]], "attach", 1)
    assert (text_of(seen), seen[-1]["type"]) == ("Hé", "done")


def test_what_a_shutdown_cut_and_no_server_can_continue_is_not_begun_again(played: PlayedServer) -> None:
    without_ids = [ACCEPTED, delta(1, "a"), done(2, "a", **CUT), "f", 1012]
    seen = read_later(played, [without_ids], "init", 2)
    assert (text_of(seen), seen[-1]["cause"]) == ("a", "shutdown")
    assert len(played.sent("generate")) == 1


def test_a_cancelled_answer_is_not_begun_again(played: PlayedServer) -> None:
    played.scripts = [[ACCEPTED, *deltas(0, 2)]]
    played.page.evaluate("window.stream = client.stream({ prompt: 'hi' }), window.one = watch(stream), undefined")
    eventually(lambda: played.page.evaluate("stream.position.seq") == 2)
    played.page.evaluate("stream.cancel()")
    played.hello = {**HELLO, "epoch": "f"}
    played.sockets[0].close(code=1012)
    assert played.page.evaluate("one")[-1]["code"] == "stream_lost"
    assert len(played.sent("generate")) == 1


def slow_server() -> AbstractContextManager[Served]:
    return serving(engine_over(roomy_runner(model=fake_model(1024), answer=paced)))


def due(prompt: str, count: int, **sampling: Any) -> str:
    return bytes(oracle(list(prompt.encode()), count, sampling=Sampling(**sampling))).decode()


@pytest.fixture(scope="module")
def sites() -> Iterator[list[Served]]:
    with slow_server() as one, slow_server() as other:
        yield [one, other]


def test_an_answer_that_two_real_servers_take_from_each_other_is_the_one_that_was_due(
    browser: Any, sites: list[Served]
) -> None:
    count = 250  # at most a thousand a second: one connection is too short
    asked = [{"prompt": "greedy", "temperature": 0}, {"prompt": "drawn", "key": "a key of the test"}]
    cutter = Cutter(*(site.port for site in sites))
    try:
        with tab(browser, f"http://127.0.0.1:{cutter.port}") as page:
            results = page.evaluate(
                """([requests, max_tokens]) => {
                  const client = new window.client.constructor(undefined, { continuations: 1000 });
                  const more = { max_tokens, ignore_eos: true };
                  return Promise.all(requests.map((request) => client.stream({ ...request, ...more }).result()));
                }""",
                [asked, count],
            )
    finally:
        cutter.close()
    greedy, drawn = results
    assert greedy["text"] == due("greedy", count, temperature=0)
    assert drawn["text"] == due("drawn", count, temperature=1, seed=zlib.crc32(b"a key of the test"))
    for result in results:
        assert result["done"]["usage"]["completion_tokens"] == count
        assert result["continued"] >= 1
        assert result["done"]["timing"]["continued_tokens"] > 0


def test_what_a_real_server_cuts_when_it_is_stopped_goes_on_at_another(browser: Any, sites: list[Served]) -> None:
    count = 900
    with slow_server() as leaving:
        cutter = Cutter(leaving.port, sites[0].port, life_s=PATIENCE_S)
        try:
            with tab(browser, f"http://127.0.0.1:{cutter.port}") as page:
                request = {"prompt": "hi", "max_tokens": count, "temperature": 0, "ignore_eos": True}
                page.evaluate("(request) => { window.stream = client.stream(request); }", request)
                page.evaluate("window.one = stream.result(), undefined")
                eventually(lambda: page.evaluate("stream.position.seq") > 5)
                leaving.stop()
                result = page.evaluate("one")
        finally:
            cutter.close()
    assert (result["text"], result["continued"]) == (due("hi", count, temperature=0), 1)
    assert 5 < result["done"]["timing"]["continued_tokens"] < count
