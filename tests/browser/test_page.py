"""The built-in page in a real browser, over a real server and an engine whose tokens come one by one."""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compiled.step import Sampling
from tests.fakes import EOS, FakeRunner, fake_model
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving

pytestmark = pytest.mark.browser

REPLY = "Every colour leaves the drop at its own angle, and <b>that</b> makes the bow. 🌈"
PROMPT_END = b"assistant: "

# Collects each text that the last answer has shown.
WATCH = """
window.seen = [];
new MutationObserver(() => {
  const texts = document.querySelectorAll("article.assistant .text");
  const text = texts[texts.length - 1]?.textContent;
  if (text && text !== seen.at(-1)) seen.push(text);
}).observe(document.getElementById("columns"), { childList: true, characterData: true, subtree: true });
"""


def reply(context: Any, sampling: Sampling) -> int:
    """`REPLY` word by word at a pace that a browser can show; a question with "forever" gets no end."""
    time.sleep(0.005)
    text = bytes(token for token in context if token < 256)
    position = len(text) - text.rindex(PROMPT_END) - len(PROMPT_END)
    if b"forever" in text:
        return ord("a") + position % 26
    data = REPLY.encode()
    return data[position] if position < len(data) else EOS


@pytest.fixture(scope="module")
def runner() -> FakeRunner:
    return roomy_runner(answer=reply, model=fake_model(max_model_len=4096))


@pytest.fixture(scope="module")
def site(runner: FakeRunner) -> Iterator[Served]:
    # Without a prefix cache every prompt is computed whole, and a test can read it off the steps.
    with serving(engine_over(runner, enable_prefix_caching=False)) as served:
        yield served


@pytest.fixture
def tab(browser: Any, watched: Callable[[Any], Any]) -> Iterator[Any]:
    """Empty, in a profile of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    tab = watched(context.new_page())
    tab.set_default_timeout(PATIENCE_S * 1000)
    yield tab
    context.close()


def visit(tab: Any, site: Served) -> Any:
    tab.goto(site.url)
    tab.wait_for_selector('#status[data-state="ready"]')
    tab.evaluate(WATCH)
    return tab


@pytest.fixture
def page(tab: Any, site: Served) -> Any:
    """The page when it is ready."""
    visit(tab, site).fill("#max-tokens", "100")
    return tab


def ask(page: Any, question: str) -> None:
    page.fill("#input", question)
    page.press("#input", "Enter")


def finished(page: Any) -> Any:
    page.wait_for_selector("article.assistant:last-child:not([aria-busy])")
    return page.locator("article.assistant").last


def test_an_answer_grows_token_by_token_and_is_text_never_markup(page: Any) -> None:
    ask(page, "How does a rainbow form?")
    answer = finished(page)
    assert answer.locator(".text").text_content() == REPLY
    seen = page.evaluate("seen")
    assert len(seen) > 5
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert answer.locator(".text").locator("b").count() == 0
    figures = answer.locator(".meta").text_content()
    assert "tokens/s" in figures and "first token after" in figures
    assert page.locator("#status-text").text_content() == "fake"


def test_the_conversation_so_far_goes_along(page: Any, runner: FakeRunner) -> None:
    ask(page, "First question")
    finished(page)
    ask(page, "Second question")
    finished(page)
    context = max((row.tokens for step in runner.steps[-200:] for row in step.rows), key=len)
    text = bytes(token for token in context if token < 256).decode()
    assert text.startswith(f"user: First question\nassistant: {REPLY}\nuser: Second question\n")
    page.click("#new")
    assert page.locator("article").count() == 0
    assert page.locator(".welcome").is_visible()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stopping_ends_the_work_on_the_server_and_keeps_the_text(page: Any, site: Served, by: str) -> None:
    before = site.get("/v1/stats")[2].get("engine_ended_cancelled", 0)
    ask(page, "Go on forever")
    eventually(lambda: page.evaluate("seen.length > 3"))
    page.click("#stop") if by == "button" else page.press("body", "Escape")
    answer = finished(page)
    assert answer.locator(".meta").text_content().startswith("Stopped · ")
    assert answer.locator(".text").text_content()
    statistics = site.get("/v1/stats")[2]
    assert (statistics["engine_ended_cancelled"], statistics["engine_open"]) == (before + 1, 0)
    assert page.locator("#send").is_visible() and page.locator("#stop").is_hidden()


def test_an_error_is_shown_and_the_conversation_goes_on(page: Any) -> None:
    page.fill("#max-tokens", "999999")
    ask(page, "Too long")
    problem = page.wait_for_selector("article.assistant .problem[role=alert]")
    assert "4096" in problem.text_content()
    page.fill("#max-tokens", "100")
    ask(page, "And now?")
    assert finished(page).locator(".text").text_content() == REPLY


def test_shift_enter_is_a_new_line_and_nothing_is_sent_while_empty(page: Any) -> None:
    page.press("#input", "Enter")
    page.type("#input", "one")
    page.press("#input", "Shift+Enter")
    page.type("#input", "two")
    assert page.input_value("#input") == "one\ntwo"
    assert page.locator("article").count() == 0
    page.press("#input", "Enter")
    assert page.locator("article.user .text").text_content() == "one\ntwo"
    finished(page)


def test_reading_back_is_not_disturbed_by_new_text(page: Any) -> None:
    page.set_viewport_size({"width": 375, "height": 420})
    page.keyboard.press("Escape")  # the settings cover the chat where there is little room
    page.keyboard.press("Escape")
    for question in ("One", "Two", "Three"):
        ask(page, question)
        finished(page)
    at_end = "Math.round(scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop) < 3"
    assert page.evaluate(f"(() => {{ const scroll = document.querySelector('.scroll'); return {at_end}; }})()")
    ask(page, "Go on forever")
    eventually(lambda: page.evaluate("seen.at(-1)?.startsWith('abc')"))
    page.evaluate("document.querySelector('.scroll').scrollTop = 0")
    page.evaluate("seen.length = 0")
    eventually(lambda: page.evaluate("seen.length > 3"))
    assert page.evaluate("document.querySelector('.scroll').scrollTop") == 0
    page.press("#input", "Escape")
    finished(page)


@pytest.mark.parametrize("columns", [1, 3])
def test_the_page_fits_a_phone(tab: Any, site: Served, columns: int) -> None:
    tab.set_viewport_size({"width": 360, "height": 640})
    visit(tab, site)
    for _ in range(columns - 1):
        tab.click("#add-column")
    ask(tab, "How does a rainbow form?")
    finished(tab)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.evaluate("document.documentElement.scrollHeight <= window.innerHeight")
    tab.click("#show-panel")
    assert tab.locator("#panel").bounding_box()["width"] <= 360
    tab.keyboard.press("Escape")
    assert tab.locator("#panel").is_hidden()


def test_an_answer_is_written_again_in_the_place_of_the_last(page: Any) -> None:
    ask(page, "First question")
    finished(page)
    page.click(".again")
    assert finished(page).locator(".text").text_content() == REPLY
    assert page.locator("article.user").count() == page.locator("article.assistant").count() == 1


def test_conversations_are_kept_and_can_be_deleted(page: Any, site: Served) -> None:
    ask(page, "About the sea")
    finished(page)
    page.click("#new")
    ask(page, "About the moon")
    finished(page)
    visit(page, site)
    assert page.locator(".conversation").all_text_contents() == ["About the moon", "About the sea"]
    page.click(".conversation >> text=About the sea")
    assert page.locator("article.user .text").all_text_contents() == ["About the sea"]
    assert page.locator("article.assistant .text").text_content() == REPLY
    for _ in range(2):
        page.click('[aria-label="Delete About the sea"]')
    assert page.locator(".conversation").all_text_contents() == ["About the moon"]
    assert page.locator("article.user .text").all_text_contents() == ["About the moon"]


def test_a_reload_goes_on_where_the_answer_was(page: Any, site: Served, runner: FakeRunner) -> None:
    ask(page, "How does a rainbow form?")
    eventually(lambda: page.evaluate("seen.length > 3"))
    runner.hold()
    try:
        assert runner.holding.wait(PATIENCE_S)
        before = page.evaluate("seen.at(-1)")
        visit(page, site)
        shown = page.locator("article.assistant[aria-busy] .text").text_content()
        assert REPLY.startswith(shown) and len(shown) >= len(before)
    finally:
        runner.release()
    answer = finished(page)
    assert answer.locator(".text").text_content() == REPLY
    assert answer.locator(".meta").text_content().startswith(f"{len(REPLY.encode()) + 1} tokens")
    assert page.locator("article").count() == 2


def test_several_prompts_run_side_by_side_on_one_socket(tab: Any, site: Served) -> None:
    sockets: list[Any] = []
    tab.on("websocket", lambda socket: sockets.append(socket))
    visit(tab, site)
    for _ in range(2):
        tab.click("#add-column")
    tab.locator(".column-head textarea").nth(1).fill("Its own")
    ask(tab, "For all")
    eventually(lambda: tab.locator("article.assistant:not([aria-busy]) .again").count() == 3)
    assert tab.locator("article.user .text").all_text_contents() == ["For all", "Its own", "For all"]
    assert tab.locator("article.assistant .text").all_text_contents() == [REPLY] * 3
    assert len(sockets) == 1


def test_tokens_are_shaded_and_tell_what_else_could_have_been(page: Any) -> None:
    page.check("#logprobs")
    ask(page, "How does a rainbow form?")
    text = finished(page).locator(".text")
    assert text.text_content() == REPLY
    assert text.locator(".token").count() > len(REPLY) - 5
    text.locator(".token").nth(3).hover()
    assert page.locator("#tip").is_visible()
    assert page.locator("#tip .chosen code").text_content() == REPLY[3]
    assert page.locator("#tip > div").count() >= 5
    text.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip .chosen code").text_content() == REPLY[1]
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"


def test_the_time_between_tokens_is_drawn(page: Any) -> None:
    ask(page, "How does a rainbow form?")
    chart = finished(page).locator(".chart")
    assert "median" in chart.locator("figcaption").text_content()
    assert chart.locator("path.line").get_attribute("d").count("L") > 20


def test_what_cannot_be_sent_is_said_before(page: Any) -> None:
    page.fill("#input", "Plan a trip")
    page.click("summary:has-text('JSON schema')")
    page.fill("#schema", '{"type": ')
    assert page.locator("#send").is_enabled()
    page.check("#use-schema")
    assert page.locator("#send").is_disabled()
    assert "JSON" in page.locator("#schema-state").text_content()
    page.fill("#schema", "[1]")
    assert page.locator("#active").text_content() == "A schema is a JSON object."
    page.fill("#schema", "{}")
    page.fill("[name=top_p]", "2")
    assert page.locator("#send").is_disabled()
    page.fill("[name=top_p]", "0.9")
    assert page.locator("#send").is_enabled()


def played(tab: Any, script: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A server of the test's own behind the page: answers each request by ``script``; gives what it was asked."""
    asked: list[dict[str, Any]] = []
    limits = {"max_message_bytes": 100_000, "max_streams": 8, "heartbeat_s": 15}
    hello = {"type": "hello", "protocol": "streamengine.v1", "epoch": "e", "auth": "none", "limits": limits}

    def connected(socket: Any) -> None:
        def receive(text: str) -> None:
            message = json.loads(text)
            if message["type"] == "generate":
                asked.append(message)
                for reply in script:
                    socket.send(json.dumps({"id": message["id"], **reply}))

        socket.on_message(receive)
        socket.send(json.dumps(hello))

    tab.route_web_socket("**/v1/stream", connected)
    return asked


def use_schema(page: Any, schema: dict[str, Any]) -> None:
    page.click("summary:has-text('JSON schema')")
    page.check("#use-schema")
    page.fill("#schema", json.dumps(schema))


def test_a_server_that_cannot_follow_a_schema_says_so_on_the_page(tab: Any, site: Served) -> None:
    refusal = {"code": "unsupported_feature", "message": "response_format is not there", "param": "response_format"}
    asked = played(tab, [{"type": "error", "status": 422, "retryable": False, **refusal}])
    page = visit(tab, site)
    use_schema(page, {"type": "integer"})
    ask(page, "A number")
    problem = page.wait_for_selector("article.assistant .problem[role=alert]").text_content()
    assert "response_format is not there" in problem and "unsupported_feature" in problem
    schema = {"name": "answer", "schema": {"type": "integer"}, "strict": True}
    assert asked[0]["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert asked[0]["delivery"]["values"] is True


def test_values_are_shown_as_they_are_complete(tab: Any, site: Served) -> None:
    text = '{"a":"<i>","b":[1]}'
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    check = {"bytes": len(text), "crc32": zlib.crc32(text.encode())}
    script: list[dict[str, Any]] = [
        {"type": "accepted", "stream": "st_0123456789abcdef", "after": 0},
        {"type": "delta", "seq": 1, "text": text[:10]},
        {"type": "value", "seq": 1, "path": "/a", "value": "<i>"},
        {"type": "delta", "seq": 2, "text": text[10:]},
        {"type": "value", "seq": 2, "path": "/b/0", "value": 1},
        {"type": "done", "seq": 3, "finish_reason": "stop", "usage": usage, "check": check},
    ]
    played(tab, script)
    page = visit(tab, site)
    use_schema(page, {"type": "object"})
    ask(page, "An object")
    values = finished(page).locator(".values")
    assert values.locator("dt").all_text_contents() == ["/a", "/b/0"]
    assert values.locator("dd").all_text_contents() == ['"<i>"', "1"]


def test_a_server_with_keys_is_asked_with_the_one_that_is_entered(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "sk-alice-öäü"\n')
    engine = engine_over(roomy_runner(answer=reply, model=fake_model(max_model_len=4096)))
    with serving(engine, api_key_file=str(keys)) as site:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(site.url)
        for key in ("sk-somebody", "sk-alice-öäü"):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", key)
            page.press("#key", "Enter")
        page.wait_for_selector('#status[data-state="ready"]')
        eventually(lambda: page.locator("#status-text").text_content() == "fake")
        ask(page, "How does a rainbow form?")
        assert finished(page).locator(".text").text_content() == REPLY
        context.close()


def test_the_theme_follows_the_system_until_it_is_chosen(page: Any, site: Served) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) != dark
    page.keyboard.press("Alt+T")
    page.keyboard.press("Alt+T")
    visit(page, site)
    assert page.evaluate(background) == dark


def test_everything_that_can_be_used_has_a_name(page: Any) -> None:
    page.click("#add-column")
    nameless = """[...document.querySelectorAll("button, input, textarea, summary")].filter((element) =>
      !element.closest("dialog") && !(element.getAttribute("aria-label") || element.textContent.trim()
        || element.labels?.length)).map((element) => element.outerHTML)"""
    assert page.evaluate(nameless) == []
