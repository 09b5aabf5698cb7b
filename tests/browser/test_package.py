"""The npm package: its size, its types, and the transport for the Vercel AI SDK."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import PATIENCE_S, Served, engine_over, roomy_runner, serving

FOLDER = Path(__file__).resolve().parents[2] / "sdk" / "browser"
PACKAGE = json.loads((FOLDER / "package.json").read_text())
MAX_LINES = 400


def test_the_client_is_small() -> None:
    """What is sent, compressed as the server sends it; and one module, which imports nothing."""
    source = (FOLDER / "client.js").read_bytes()
    assert len(gzip.compress(source)) <= 5600 and len(source) <= 15 * 1024
    assert not re.search(rb"^import |\bimport\(", source, re.MULTILINE)


def test_no_script_is_too_long_to_read() -> None:
    scripts = [*FOLDER.glob("*.js"), *FOLDER.glob("page/*.js")]
    assert len(scripts) > 5
    assert {script.name: lines for script in scripts if (lines := script.read_text().count("\n")) > MAX_LINES} == {}


def test_text_never_becomes_markup() -> None:
    for script in FOLDER.glob("page/*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
        )
        assert found == [], script.name


def test_the_package_holds_everything_that_it_exports() -> None:
    exported = {path.removeprefix("./") for entry in PACKAGE["exports"].values() for path in entry.values()}
    assert exported < set(PACKAGE["files"])
    for name in PACKAGE["files"]:
        assert (FOLDER / name).is_file()
        for imported in re.findall(r'"\./([^"]+)"', (FOLDER / name).read_text()):
            assert imported in PACKAGE["files"], f"{name} imports {imported}"


def test_types_are_right_and_the_declarations_current(tmp_path: Path) -> None:
    compiler = FOLDER / "node_modules" / ".bin" / "tsc"
    if not compiler.exists() or shutil.which("node") is None:
        pytest.skip("TypeScript is missing: npm install in sdk/browser")
    # From a copy without declarations, which would be read in place of the scripts.
    for name in ("client.js", "ai-sdk.js", "types.d.ts", "tsconfig.json", "package.json"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(FOLDER / "node_modules")
    user = 'import type { ChatTransport, UIMessage } from "ai";\nimport { StreamEngine } from "./client.js";\n'
    user += 'import { StreamEngineTransport } from "./ai-sdk.js";\n'
    user += "export const transport: ChatTransport<UIMessage> = new StreamEngineTransport(new StreamEngine());\n"
    user += 'export const text: Promise<string> = new StreamEngine().stream({ prompt: "", max_tokens: 1 }).text();\n'
    user += '// @ts-expect-error there is no such field\nnew StreamEngine().stream({ prompt: "", temprature: 1 });\n'
    (tmp_path / "user.ts").write_text(user)
    config = json.loads((tmp_path / "tsconfig.json").read_text())
    config["files"].append("user.ts")
    (tmp_path / "tsconfig.json").write_text(json.dumps(config))
    run = subprocess.run([str(compiler), "-p", tmp_path], capture_output=True, text=True, timeout=100, check=False)
    assert (run.stdout + run.stderr, run.returncode) == ("", 0)
    for name in ("client.d.ts", "ai-sdk.d.ts"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), f"{name} is old: npm run types"


# the transport, in a browser, over a client that the test plays


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    with serving(engine_over(roomy_runner())) as served:
        yield served


@pytest.fixture
def page(browser: Any, site: Served) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.route("**/ai-sdk.js", lambda route: route.fulfill(path=FOLDER / "ai-sdk.js", content_type="text/javascript"))
    page.goto(f"{site.url}/ready")
    page.evaluate("""(async () => {
      const { StreamEngine, StreamEngineError } = await import("/client.js");
      const { StreamEngineTransport } = await import("/ai-sdk.js");
      const user = { id: "m", role: "user", parts: [{ type: "text", text: "hi" }] };
      const options = { chatId: "c", trigger: "submit-message", messages: [user] };
      const collect = async (stream) => {
        const chunks = [];
        for await (const chunk of stream) chunks.push(chunk);
        return chunks;
      };
      /** A client whose every stream gives these events; what is no event is thrown. */
      const playing = (events) => ({
        asked: [],
        async *stream(request) {
          this.asked.push(request);
          for (const event of events) {
            if (event.code) throw new StreamEngineError(event.code, event.message, event);
            yield event;
          }
        },
        resume(position) {
          return this.stream(position);
        },
      });
      Object.assign(window, { StreamEngine, StreamEngineTransport, options, collect, playing });
    })()""")
    yield page
    context.close()


ACCEPTED = {"type": "accepted", "stream": "st_0123456789abcdef", "after": 0}
USAGE = {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}


def chunks(page: Any, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    script = "async (events) => collect(await new StreamEngineTransport(playing(events)).sendMessages(options))"
    return page.evaluate(script, events)


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "delta", "seq": 1, "n": 1, "text": text, **more}


@pytest.mark.browser
def test_an_answer_becomes_parts_that_begin_and_end(page: Any) -> None:
    done = {"type": "done", "seq": 7, "finish_reason": "tool_calls", "usage": USAGE}
    call = {"channel": "tool", "call": {"index": 0}}
    given = chunks(
        page,
        [
            ACCEPTED,
            {"type": "progress", "phase": "prefill"},
            delta("hm", channel="reasoning"),
            delta("He"),
            delta("llo"),
            delta('{"a":', channel="tool", call={"index": 0, "id": "call_1", "name": "f"}),
            delta("1}", **call),
            delta("[", channel="tool", call={"index": 1, "id": "call_2", "name": "g"}),
            done,
        ],
    )
    assert [chunk["type"] for chunk in given] == [
        *("start", "start-step"),
        *("reasoning-start", "reasoning-delta", "reasoning-end"),
        *("text-start", "text-delta", "text-delta", "text-end"),
        *("tool-input-start", "tool-input-delta", "tool-input-delta", "tool-input-available"),
        *("tool-input-start", "tool-input-delta", "tool-input-error"),
        *("finish-step", "finish"),
    ]
    assert given[0]["messageId"] == ACCEPTED["stream"]
    assert given[12] == {"type": "tool-input-available", "toolCallId": "call_1", "toolName": "f", "input": {"a": 1}}
    assert (given[-1]["finishReason"], given[-1]["messageMetadata"]["usage"]) == ("tool-calls", USAGE)
    assert len({chunk["id"] for chunk in given if chunk["type"].startswith("text-")}) == 1


@pytest.mark.browser
def test_an_answer_that_another_server_goes_on_with_or_begins_again_is_one_message(page: Any) -> None:
    done = {"type": "done", "seq": 3, "finish_reason": "stop", "usage": USAGE}
    again = [{**ACCEPTED, "stream": f"st_another{n}", "after": n} for n in (0, 1)]
    given = chunks(page, [ACCEPTED, again[0], delta("a"), again[1], delta("b"), done])
    assert [chunk["type"] for chunk in given] == [
        *("start", "start-step", "text-start", "text-delta", "text-delta", "text-end", "finish-step", "finish")
    ]
    assert given[0]["messageId"] == ACCEPTED["stream"]


@pytest.mark.browser
def test_a_failure_is_a_chunk_and_an_abort_ends_as_a_fetch_would(page: Any) -> None:
    given = chunks(page, [ACCEPTED, delta("a"), {"code": "engine_error", "message": "broken"}])
    assert given[-1] == {"type": "error", "errorText": "broken"}
    abort = """(async () => {
      const controller = new AbortController();
      const transport = new StreamEngineTransport(new StreamEngine(), { max_tokens: 200, ignore_eos: true });
      const reader = (await transport.sendMessages({ ...options, abortSignal: controller.signal })).getReader();
      await reader.read();
      controller.abort();
      for (;;) try { if ((await reader.read()).done) return "closed"; } catch (error) { return error.name; }
    })()"""
    assert page.evaluate(abort) == "AbortError"


@pytest.mark.browser
def test_a_chat_of_an_earlier_page_is_shown_again_from_its_beginning(page: Any) -> None:
    resumed = page.evaluate(
        """async (first) => {
          const before = new StreamEngineTransport(new StreamEngine(), { max_tokens: 100, ignore_eos: true });
          const reader = (await before.sendMessages(options)).getReader();
          while ((await reader.read()).value.type !== "text-delta");
          const after = new StreamEngineTransport(new StreamEngine());
          const given = await collect(await after.reconnectToStream({ chatId: "c" }));
          const others = ["c", "d"].map((chatId) => after.reconnectToStream({ chatId }));
          return [given, ...(await Promise.all(others))];
        }"""
    )
    given, over, never = resumed
    assert (over, never) == (None, None)
    assert [chunk["type"] for chunk in given if "delta" not in chunk["type"]] == [
        *("start", "start-step", "text-start", "text-end", "finish-step", "finish")
    ]
    assert len("".join(chunk.get("delta", "") for chunk in given)) == 100


@pytest.mark.browser
def test_a_stream_that_is_gone_is_no_stream(page: Any) -> None:
    gone = """async (code) => {
      const transport = new StreamEngineTransport(playing([{ code, message: "gone" }]));
      sessionStorage.setItem("streamengine.c", "st_0123456789abcdef");
      return [await transport.reconnectToStream({ chatId: "c" }), sessionStorage.length];
    }"""
    assert page.evaluate(gone, "stream_not_found") == [None, 0]


@pytest.mark.browser
def test_messages_take_the_form_of_chat_completions(page: Any) -> None:
    tool = {
        "type": "tool-f",
        "toolCallId": "call_1",
        "state": "output-available",
        "input": {"a": 1},
        "output": {"b": 2},
    }
    parts = [{"type": "step-start"}, {"type": "text", "text": "so"}, tool]
    asked = page.evaluate(
        """async (parts) => {
          const client = playing([]);
          const messages = [...options.messages, { id: "n", role: "assistant", parts }];
          await collect(await new StreamEngineTransport(client, { top_k: 1 }).sendMessages(
            { ...options, messages, body: { temperature: 0 } }));
          return client.asked[0];
        }""",
        parts,
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert asked == {
        "top_k": 1,
        "temperature": 0,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "so", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"b":2}'},
        ],
    }


@pytest.mark.browser
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("headers: { a: 'b' }", "no headers"),
        ("messages: [{ id: 'm', role: 'user', parts: [{ type: 'file', url: 'x', mediaType: 'y' }] }]", "type file"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(page: Any, change: str, why: str) -> None:
    send = f"new StreamEngineTransport(playing([])).sendMessages({{ ...options, {change} }})"
    assert why in page.evaluate(f"{send}.catch((error) => error.message)")
