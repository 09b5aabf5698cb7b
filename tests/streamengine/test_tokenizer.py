"""Prompts and messages become the ids that the model was trained on; what cannot is refused by its place."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from streamengine.checks import check_text
from streamengine.errors import InvalidRequest, StartupError, UnsupportedFeature
from streamengine.tokenizer import FolderTokenizer, load_tokenizer, read_messages

CHATML = (
    "{% for message in messages %}\n"
    "    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = ({"role": "user", "content": "hi"},)


def make_folder(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """A byte-level BPE trained on a few lines, with a beginning-of-sequence token before every prompt."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = ["the cat sat on the mat", "the dog sat on the log", "user assistant system"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def rendered(tokenizer: FolderTokenizer, messages: Iterable[dict[str, str]] = USER) -> str:
    """The text of a chat, special tokens and all."""
    return tokenizer._tokenizer.decode(tokenizer.chat(list(messages)), skip_special_tokens=False)


def test_a_prompt_gets_the_special_tokens_of_its_vocabulary_and_no_others(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    ids = tokenizer.encode("the cat")
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.vocab_size == 292
    assert tokenizer.longest_token >= len("<|im_start|>")


def test_a_part_of_a_text_has_no_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    assert tokenizer.encode_part(" the cat") == tokenizer.encode(" the cat")[1:]


def test_the_bytes_of_single_tokens_join_to_the_text_and_special_tokens_have_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    text = "the cat – 😀 é\n\t"
    parts = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    assert b"".join(parts) == text.encode()
    assert parts[0] == b""
    assert any(not part.decode(errors="ignore") for part in parts[1:])
    assert tokenizer.token_bytes(10**9) == b""


def test_the_bytes_of_a_sentence_piece_keep_their_space_and_byte_tokens_are_bytes() -> None:
    vocab = {"▁Hello": 0, "lo": 1, "<0xE2>": 2, "▁": 3, "▁▁▁a": 4}
    library = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = FolderTokenizer(library, None)
    assert [tokenizer.token_bytes(token) for token in range(5)] == [b" Hello", b"lo", b"\xe2", b" ", b"   a"]


def test_text_survives_the_round_trip_exactly(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    for text in ("  two  spaces , and . more ", "€ 😀 ﷽", "a\n\n\tb", " n't 's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_saved_truncation_and_padding_change_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    text = "the cat sat on the mat, the dog sat on the log"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


def test_ids_outside_of_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    assert tokenizer.decode([0, 10_000_000, *tokenizer.encode("ok")]) == "ok"


def test_a_chat_is_the_template_up_to_where_the_assistant_speaks(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hi"}]
    text = rendered(tokenizer, messages)
    # Blocks leave neither their line nor their indentation behind, and <s> is the template's to write.
    assert text == (
        "    <|im_start|>system\nbe good<|im_end|>\n\n    <|im_start|>user\nhi<|im_end|>\n\n<|im_start|>assistant\n"
    )
    assert 1 in tokenizer.chat(messages)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi<|im_end|>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': '<é>'} | tojson(indent=2) }}", '{\n  "a": "<é>"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}", "hi"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% if tools is defined %}tools{% else %}none{% endif %}", "none"),
    ],
)
def test_templates_find_what_the_ecosystem_promises_them(tmp_path: Path, template: str, text: str) -> None:
    assert rendered(load_tokenizer(make_folder(tmp_path, template))) == text


def test_the_template_may_be_in_the_config_alone_or_among_others(tmp_path: Path) -> None:
    one = make_folder(tmp_path, None, chat_template="one {{ messages[0].content }}")
    assert rendered(load_tokenizer(one)) == "one hi"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert rendered(load_tokenizer(make_folder(tmp_path, None, chat_template=named))) == "yes"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ range(10000000000) }}", "range"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_requests_fault(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, template))
    with pytest.raises(InvalidRequest, match=message) as error:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert error.value.param == "messages"


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_a_folder_that_cannot_be_used_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = make_folder(tmp_path, "\n{% if %}")
    with pytest.raises(StartupError, match=r"chat_template\.jinja: chat template, line 2"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}'),
        ("tokenizer_config.json", b'{"chat_template": "{{ x | nonesuch }}"}'),
        ("tokenizer_config.json", None),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% endfor %}"),
        ("chat_template.jinja", b"{{ " + b"(" * 5000),
        ("chat_template.jinja", None),
    ],
)
def test_a_broken_file_is_one_line_with_its_name(tmp_path: Path, file: str, content: bytes | None) -> None:
    path = make_folder(tmp_path, None) / file
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=file):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro twice() %}{{ twice() }}{{ twice() }}{% endmacro %}{{ twice() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 10 * 10000 * [1] * 10000 }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_template_that_would_never_end_is_cut_short(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, template))
    with pytest.raises(InvalidRequest, match="chat template refuses") as error:
        tokenizer.chat(USER)
    assert len(error.value.message) <= 300


def test_what_templates_do_with_loops_macros_and_repetition_is_left_alone(tmp_path: Path) -> None:
    template = (
        "{%- macro twice(x) %}{{ x * 2 }}{% endmacro -%}{%- for m in messages -%}"
        "{{ loop.index }}{{ loop.last }}{{ twice(m.content) }}{{ '-' * 3 }}{%- else -%}none{%- endfor -%}"
    )
    assert rendered(load_tokenizer(make_folder(tmp_path, template))) == "1Truehihi---"


def test_messages_are_read_to_roles_and_strings() -> None:
    messages = read_messages(
        (
            {"role": "system", "content": "a", "tool_calls": None},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": " c"}]},
        )
    )
    assert messages == [{"role": "system", "content": "a"}, {"role": "user", "content": "b c"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"content": "a"}], "messages[1].role"),
        ([{"role": "", "content": "a"}], "messages[0].role"),
        ([{"role": "x" * 65, "content": "a"}], "messages[0].role"),
        ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
    ],
)
def test_a_malformed_message_is_refused_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_messages(messages)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "a", "weight": 1}, "messages[0].weight"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(message: Any, param: str) -> None:
    with pytest.raises(UnsupportedFeature) as error:
        read_messages([message])
    assert error.value.param == param


def test_a_template_may_name_who_speaks(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }} {% endfor %}"
    tokenizer = load_tokenizer(make_folder(tmp_path, None, chat_template=template))
    messages = [{"role": "user", "content": "hi", "name": "bob"}, {"role": "user", "content": "ho"}]
    assert rendered(tokenizer, read_messages(messages)) == "bob: hi user: ho "


def test_a_template_may_look_at_more_than_messages(tmp_path: Path) -> None:
    template = "{{ 'thinking' if enable_thinking is not defined or enable_thinking else 'quick' }}"
    tokenizer = load_tokenizer(make_folder(tmp_path, None, chat_template=template))
    said = [tokenizer.decode(tokenizer.chat(USER, options=options)) for options in ({}, {"enable_thinking": False})]
    assert said == ["thinking", "quick"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "_turn"])
def test_what_the_engine_tells_a_template_is_not_the_clients_to_set(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path))
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs cannot set {name}$") as error:
        tokenizer.chat(USER, options={name: "x"})
    assert error.value.param == "chat_template_kwargs"


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert check_text("a😀", "prompt") == "a😀"
    with pytest.raises(InvalidRequest, match=r"lone surrogate, U\+D83D, at character 1"):
        check_text("a\ud83d", "prompt")
