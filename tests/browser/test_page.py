"""The built-in page in a real browser, over a real server and an engine whose tokens come one by one."""

import time
from collections.abc import Iterator
from itertools import pairwise
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
}).observe(document.getElementById("log"), { childList: true, characterData: true, subtree: true });
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
def page(browser: Any, site: Served) -> Iterator[Any]:
    """The page when it is ready. Anything on its console is a failure: a blocked style, an error."""
    context = browser.new_context(viewport={"width": 375, "height": 700})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(site.url)
    page.wait_for_selector('#status[data-state="ready"]')
    page.fill("#max-tokens", "100")
    page.evaluate(WATCH)
    yield page
    context.close()
    assert complaints == []


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
    page.click("#reset")
    assert page.locator("article").count() == 0
    assert page.locator("#welcome").is_visible()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stopping_ends_the_work_on_the_server_and_keeps_the_text(page: Any, site: Served, by: str) -> None:
    before = site.get("/v1/stats")[2].get("engine_ended_cancelled", 0)
    ask(page, "Go on forever")
    eventually(lambda: page.evaluate("seen.length > 3"))
    page.click("#stop") if by == "button" else page.press("#input", "Escape")
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
    for question in ("One", "Two", "Three"):
        ask(page, question)
        finished(page)
    at_end = "Math.round(scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop) < 3"
    assert page.evaluate(f"(() => {{ const scroll = document.getElementById('scroll'); return {at_end}; }})()")
    ask(page, "Go on forever")
    eventually(lambda: page.evaluate("seen.at(-1)?.startsWith('abc')"))
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    page.evaluate("seen.length = 0")
    eventually(lambda: page.evaluate("seen.length > 3"))
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 0
    page.press("#input", "Escape")
    finished(page)


def test_the_page_fits_a_phone(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= window.innerHeight")
