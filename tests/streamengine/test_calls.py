"""Calls of tools are told from text as they come, in the format that a chat template has them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from streamengine.bell import Bell
from streamengine.calls.conversation import characters, in_words, read_calls
from streamengine.calls.format import IN_WORDS, CallFormat
from streamengine.calls.parser import CallHead, CallParser, Piece, ToolCall
from streamengine.errors import InvalidRequest, UnsupportedFeature
from streamengine.log import Log
from streamengine.text import Detokenizer
from streamengine.tokenizer import FolderTokenizer, load_tokenizer, read_messages
from tests.fakes import byte_tokenizer_json

LIST = CallFormat(
    first='[CALLS] [{"name": "', middle='", "args": ', between='}, {"name": "', last="}]", marker="[CALLS]"
)
JSON = CallFormat(first='{"name": "', middle='", "parameters": ', between="", last="}", marker="{")
TAGS = CallFormat(first="<f=", middle=">", between="</f><f=", last="</f>", marker="<f=")
FORMATS = [IN_WORDS, LIST, JSON, TAGS]
CALLS = [("get", '{"a": "}\\"{\\\\", "b": {"c": [1, {}]}}'), ("get_2-x", "{}"), ("é not a name", "{")]
HELLO = [{"role": "user", "content": "hi"}]


def parse(format: CallFormat, parts: Sequence[str]) -> list[Any]:
    """Texts, and calls as ``[name, arguments]``, in order."""
    parser, found = CallParser(format), []
    for part in parts:
        found += parser.feed(part)
    return joined([*found, *parser.finish()])


def joined(pieces: Sequence[Piece]) -> list[Any]:
    found: list[Any] = []
    last: CallHead | None = None
    for text, call in pieces:
        assert text
        if call is None:
            found.append(text) if last or not found else found.append(found.pop() + text)
        elif last is None or call.index != last.index:
            assert call.id and call.name
            found.append([call.name, text])
        else:
            found[-1][1] += text
        last = call
    return found


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.marker)
def test_an_answer_that_is_cut_shows_no_markup_wherever_it_is_cut(format: CallFormat) -> None:
    said = "" if format.leads else "so "
    calls = [("get", '{"a": 1}'), ("get_x", "{}")]
    text = said + format.write(calls if format.between else calls[:1])
    for end in range(len(text)):
        parser = CallParser(format)
        pieces = [*parser.feed(text[:end]), *parser.finish(cut=True)]
        told = joined(pieces)
        texts = [part for part in told if isinstance(part, str)]
        assert texts in ([], [said[:end]])
        assert [part for part in told if part not in texts] in (
            *([["get", '{"a": 1}'[:size]]] for size in range(1, 9)),
            *([["get", '{"a": 1}'], ["get_x", "{}"[:size]]] for size in (1, 2)),
            [],
        )


def whole(format: CallFormat, text: str) -> bool:
    parser = CallParser(format)
    parser.feed(text)
    return parser.whole


fragments = st.sampled_from(
    [
        *(part for one in FORMATS for part in (one.first, one.middle, one.between, one.last, one.marker)),
        *("get", "{}", "<tool_call", '{"a": "\\"}"}', "<", "{", "}", '"', "\\", "hello ", "\n"),
    ]
)
texts = st.lists(fragments | st.text(max_size=3), max_size=12).map("".join) | st.builds(
    lambda text, format, calls, tail: text + format.write(calls) + tail,
    st.text(max_size=5),
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=3),
    st.sampled_from(["", "\n", "x", "\n<tool_call>"]),
)


@given(st.sampled_from(FORMATS), texts, st.data())
def test_wherever_a_text_is_cut_the_same_text_and_calls_are_in_it(
    format: CallFormat, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(format, parts) == parse(format, list(text)) == parse(format, [text])


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_is_read(format: CallFormat) -> None:
    calls = CALLS[:2] if format.between else CALLS[:1]
    text = "" if format.leads else "Let me see. "
    assert parse(format, [text + format.write(calls)]) == [*filter(None, [text]), *map(list, calls)]
    assert whole(format, text + format.write(calls))


def test_text_that_only_begins_like_a_call_is_text() -> None:
    for text in ("a <tool_", "<<tool_call", "<tool_cal l>", ""):
        assert parse(IN_WORDS, list(text)) == [*filter(None, [text])]
        assert not whole(IN_WORDS, text)
    assert parse(JSON, ["x" + JSON.write(CALLS[:1])]) == ["x" + JSON.write(CALLS[:1])]


def test_text_is_held_no_longer_than_it_may_begin_a_call() -> None:
    parser = CallParser(IN_WORDS)
    assert [[piece.text for piece in parser.feed(part)] for part in ("a<tool", "_call", "s>b", "<")] == [
        ["a"],
        [],
        ["<tool_calls>b"],
        [],
    ]


def test_arguments_come_as_they_are_written_and_their_call_is_named_first() -> None:
    parser = CallParser(IN_WORDS)
    parts = ("<tool_call>", '\n{"name": "get', '", "arguments": ', '{"a"', ": 1}", "}\n</tool_call>")
    shown = [[piece.text for piece in parser.feed(part)] for part in parts]
    assert shown == [[], [], [], ['{"a"'], [": 1}"], []]
    assert parser.whole


@pytest.mark.parametrize("cut", ["<tool_call>", '"na', 'me":', "{", '"}\\"', "}}", "}\n</tool"])
def test_calls_that_are_cut_are_not_whole(cut: str) -> None:
    text = IN_WORDS.write(CALLS[:1])
    assert not whole(IN_WORDS, text[: text.index(cut) + len(cut)])
    assert not whole(IN_WORDS, text + "x")


def test_ids_are_of_the_usual_form_and_each_is_another() -> None:
    calls = [piece.call for piece in CallParser(IN_WORDS).feed(IN_WORDS.write(CALLS[:2]))]
    ids = {call.id for call in calls if call is not None}
    assert len(ids) == 2
    assert all(id and id.startswith("call_") and len(id) == 29 for id in ids)


# on tokens, and in a log


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def logged(text: str, cuts: Sequence[int] = (), stop: Sequence[str] = ()) -> tuple[Log, Detokenizer]:
    log, detokenizer = Log("st_x"), Detokenizer(decode, (), stop, calls=CallParser(IN_WORDS))
    ids = text.encode()
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        entries = detokenizer.push(ids[start:end])
        entries += detokenizer.finish() if end == len(ids) else []
        for after, call in detokenizer.switches:
            log.switch(after, call)
        detokenizer.switches.clear()
        log.append(entries)
    return log, detokenizer


SPOKEN = "Größe? " + IN_WORDS.write(CALLS[:2])


@given(st.lists(st.integers(0, len(SPOKEN.encode())), max_size=8).map(sorted), st.integers(0, 150))
@example([], 0)
def test_a_log_shows_the_same_slices_again_to_who_comes_back(cuts: list[int], after: int) -> None:
    log, _ = logged(SPOKEN, cuts)
    assert log.text == "Größe? "
    assert [(call.name, call.arguments) for call in log.tool_calls] == CALLS[:2]
    assert len(log) == len(SPOKEN.encode())
    reader, texts, heads, seq = log.reader(Bell(), after), {None: "", 0: "", 1: ""}, [], after
    while (delta := reader.take()) is not None:
        assert delta.seq - delta.n == seq
        seq = delta.seq
        texts[delta.call.index if delta.call else None] += delta.text
        heads += [delta.call] if delta.call and delta.call.name else []
    assert seq == len(log)
    said = "".join(filter(None, (log._slice(0, after).text if after else "", *texts.values())))
    assert said == log.text + "".join(call.arguments for call in log.tool_calls)
    if not after:
        assert [(head.id, head.name) for head in heads] == [(call.id, call.name) for call in log.tool_calls]


@pytest.mark.parametrize(
    ("stop", "text", "hit"), [("get", "Größe? ", None), ("?", "Größe", "?"), ("? x", "Größe? ", None)]
)
def test_stop_strings_are_looked_for_in_text_alone(stop: str, text: str, hit: str | None) -> None:
    log, detokenizer = logged(SPOKEN, stop=[stop])
    assert (log.text, detokenizer.stop_sequence, len(log.tool_calls)) == (text, hit, 0 if hit else 2)


def test_a_token_of_a_whole_call_and_more_goes_to_the_text_and_the_next_to_the_call() -> None:
    words = {1: "so " + IN_WORDS.write([("get", '{"a": 1}')])[:-14], 2: "}\n</tool_", 3: "call>"}
    detokenizer = Detokenizer(lambda ids: "".join(words[id] for id in ids), calls=CallParser(IN_WORDS))
    assert detokenizer.push([1, 2, 3]) + detokenizer.finish() == [(1, "so "), (2, '{"a": 1}'), (3, "")]
    assert [after for after, _ in detokenizer.switches] == [1]


# chat templates

HERMES = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""
BRACKETS = """
{%- if tools is defined %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}[CALLS] [
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ '' if loop.last else ', ' }}
        {%- endfor %}]<eos>
    {%- elif message.role == 'tool' %}[RESULT]{{ message.tool_call_id }} {{ message.content }}
    {%- elif message.role == 'assistant' %}{{ message.content }}<eos>
    {%- else %}[{{ message.role }}]{{ message.content }}{% endif %}
{%- endfor %}"""
BARE = """
{%- for message in messages %}<|{{ message.role }}|>
{% if message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{ message.content }}{% endif %}<eos>
{%- endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"""
FENCED = """
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<|call|>{{ call.function.name + '\\n```json\\n' + call.function.arguments }}
{{- '\\n```<|end|>' }}
{%- endfor %}<eos>{% endfor %}"""


def tokenizer_of(folder: Path, template: str, *added: str) -> FolderTokenizer:
    made = tokenizers.Tokenizer.from_str(byte_tokenizer_json())
    made.add_special_tokens([tokenizers.AddedToken(text, special=not text.startswith("<t")) for text in added])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def text_of(tokenizer: FolderTokenizer, messages: Any, tools: Sequence[Any] = ()) -> str:
    return tokenizer.decode(tokenizer.chat(read_messages(messages), tools), special=True)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (HERMES, ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>")),
        (BRACKETS, ('[CALLS] [{"name": "', '", "arguments": ', "}]", "[CALLS]")),
        (BARE, ('{"name": "', '", "parameters": ', "}", "{")),
        (FENCED, ("<|call|>", "\n```json\n", "\n```<|end|>", "<|call|>")),
    ],
)
def test_how_calls_are_written_is_learnt_from_the_template(tmp_path: Path, template: str, format: Any) -> None:
    calls = tokenizer_of(tmp_path, template).calls()
    assert (calls.first, calls.middle, calls.last, calls.marker) == format
    assert (calls.native, calls.as_text, calls.short_ids) == (True, template == FENCED, template == BRACKETS)
    assert bool(calls.between) == (template != BARE)
    assert parse(calls, [calls.write(CALLS[: 2 if calls.between else 1])]) == [
        *map(list, CALLS[: 2 if calls.between else 1])
    ]


def test_a_marker_that_is_a_token_is_known_as_one(tmp_path: Path) -> None:
    calls = tokenizer_of(tmp_path, HERMES, "<tool_call>", "</tool_call>", "<|im_start|>").calls()
    assert dict(calls.tokens) == {"</tool_call>": 259, "<tool_call>": 258}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("{{ call.function.name }}({{ call.function.arguments | tojson }})", "stand out"),
        ("<x><arg>{{ call.function.arguments | tojson }}</arg>{{ call.function.name }}</x>", "JSON after"),
        (
            "<call>{{ call.function.name }}{% for k in call.function.arguments %}{{ k }}{% endfor %}",
            "JSON",
        ),
        ("{{ raise_exception('no calls, please') }}", "no calls, please"),
    ],
)
def test_a_format_that_is_not_understood_is_refused_with_the_reason(tmp_path: Path, call: str, why: str) -> None:
    template = FENCED[: FENCED.index("<|call|>")] + call + "{% endfor %}<eos>{% endfor %}"
    tokenizer = tokenizer_of(tmp_path, template)
    for _ in range(2):
        with pytest.raises(UnsupportedFeature, match=why) as refused:
            tokenizer.calls()
        assert refused.value.param == "tools"


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_123456789", "type": "function", "function": {"name": "get", "arguments": '{"city": "Köln"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_123456789", "content": "rain"},
]
TOOLS = [{"type": "function", "function": {"name": "get", "description": "The weather.", "parameters": {}}}]


def test_calls_and_results_of_a_conversation_are_written_by_the_template(tmp_path: Path) -> None:
    text = text_of(tokenizer_of(tmp_path, HERMES), CONVERSATION, TOOLS)
    assert '<tool_call>\n{"name": "get", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>' in text
    assert '"description": "The weather."' in text
    assert "<|im_start|>tool\nrain" in text


def test_ids_are_shortened_for_a_template_that_wants_short_ones(tmp_path: Path) -> None:
    text = text_of(tokenizer_of(tmp_path, BRACKETS), CONVERSATION)
    assert '"id": "123456789"}]' in text
    assert "[RESULT]123456789 rain" in text


def test_arguments_are_text_for_a_template_that_wants_text(tmp_path: Path) -> None:
    assert '```json\n{"city": "Köln"}\n```' in text_of(tokenizer_of(tmp_path, FENCED), CONVERSATION)


def test_a_template_that_knows_no_tools_is_told_of_them_in_words(tmp_path: Path) -> None:
    plain = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    text = text_of(tokenizer_of(tmp_path, plain), CONVERSATION, TOOLS)
    assert text.startswith("[system]Be kind.\n\n")
    assert json.dumps(TOOLS[0]["function"]) in text
    assert text.endswith(
        '[assistant]<tool_call>\n{"name": "get", "arguments": {"city": "Köln"}}\n</tool_call>'
        "[user]<tool_response>\nrain\n</tool_response>"
    )
    assert text_of(tokenizer_of(tmp_path, plain), HELLO, TOOLS).startswith("[system]You can call")
    assert text_of(tokenizer_of(tmp_path, plain), HELLO) == "[user]hi"


def test_results_of_one_turn_are_told_together() -> None:
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    told = in_words([*HELLO, *results, *HELLO], (), IN_WORDS)
    assert [message["role"] for message in told] == ["user", "user", "user"]
    assert told[1]["content"] == "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"


def test_arguments_count_where_a_conversation_is_measured() -> None:
    (message,) = read_messages([CONVERSATION[2]])
    assert characters(message) == len('{"city":"Köln"}')


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        (5, "m.tool_calls"),
        ([{"id": "1"}], "m.tool_calls"),
        ([{"id": "1", "function": {"name": "a", "arguments": "{"}}], "m.tool_calls[0].function.arguments"),
        ([{"id": "1", "function": {"name": "a", "arguments": "[]"}}], "m.tool_calls[0].function.arguments"),
        ([{"id": "1", "function": {"name": "a", "arguments": "[" * 9000}}], "m.tool_calls[0].function.arguments"),
        ([{"id": "1", "function": {"name": "a", "arguments": {}}}], "m.tool_calls"),
    ],
)
def test_calls_that_are_none_are_refused_by_their_place(calls: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_calls(calls, "m.tool_calls")
    assert refused.value.param == place


def test_whole_calls_are_values() -> None:
    log, _ = logged(SPOKEN)
    first = log.tool_calls[0]
    assert first == ToolCall(id=first.id, name="get", arguments=CALLS[0][1])
