"""``response_format`` through the engine, the link and the core; only the runner is a fake."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from streamengine.engine import Engine, Generate
from streamengine.errors import GrammarError, InvalidRequest, RequestError, UnsupportedFeature
from streamengine.sampling import SamplingParams
from tests.fakes import FakeRunner, byte_tokenizer_json, fake_kv, fake_model
from tests.serving import engine_over

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "names": {"type": "array", "items": {"const": "Tom"}, "maxItems": 2},
    },
    "required": ["kind", "names"],
    "additionalProperties": False,
}
DRAWN = SamplingParams(temperature=2.0, max_tokens=400, seed=5)


def of_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **more}}


@asynccontextmanager
async def opened(folder: Path, **config: Any) -> AsyncIterator[Engine]:
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    runner = FakeRunner(kv=fake_kv(pages=1025, page_size=16), model=fake_model(1024, str(folder)))
    with anyio.fail_after(20):
        async with engine_over(runner, **config)(lambda progress: None) as engine:
            yield engine


async def test_an_answer_is_an_instance_of_its_schema(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        result = await engine.generate(prompt="a pet", sampling=DRAWN, response_format=of_schema(SCHEMA))
    jsonschema.validate(json.loads(result.text), SCHEMA)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("response_format", "texts"),
    [
        ({"type": "choice", "choice": ["yes", "no", 'say "no"\n', "grüße"]}, {"yes", "no", 'say "no"\n', "grüße"}),
        ({"type": "choice", "choice": ["\x00\x7f", "\u2028/", "a\\b"]}, {"\x00\x7f", "\u2028/", "a\\b"}),
        ({"type": "choice", "choice": [f"{n:05}" for n in range(10_000)]}, {f"{n:05}" for n in range(10_000)}),
        ({"type": "regex", "regex": "(|a)"}, {"", "a"}),
        ({"type": "regex", "regex": "^/|[+*?]{2}?$"}, {"/", *map("".join, product("+*?", repeat=2))}),
        ({"type": "regex", "regex": "a{3}b?"}, {"aaa", "aaab"}),
        ({"type": "grammar", "grammar": '// <[1]>\nstart: "<b>" | /<[1]>/ // temperature'}, {"<b>", "<1>"}),
        ({"type": "grammar", "grammar": 'start: "x" end\nend: "y" | "z"'}, {"xy", "xz"}),
    ],
)
async def test_an_answer_is_what_its_format_says(
    tmp_path: Path, response_format: dict[str, Any], texts: set[str]
) -> None:
    async with opened(tmp_path) as engine:
        for seed in range(5):
            params = SamplingParams(max_tokens=50, seed=seed)
            result = await engine.generate(prompt="?", sampling=params, response_format=response_format)
            assert result.text in texts


async def test_a_text_format_is_no_grammar(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    async with opened(tmp_path) as engine:
        plain = await engine.generate(prompt="?", sampling=params)
        text = await engine.generate(prompt="?", sampling=params, response_format={"type": "text"})
    assert plain.text == text.text


@pytest.mark.parametrize(
    ("response_format", "error", "message"),
    [
        ({"type": "json"}, InvalidRequest, "json"),
        ({"type": "regex"}, InvalidRequest, "regex"),
        ({"type": "choice", "choice": []}, InvalidRequest, "length >= 1"),
        ({"type": "regex", "regex": "("}, GrammarError, "regex parse error"),
        ({"type": "regex", "regex": "foo**"}, GrammarError, "multiple repeat at position 4"),
        ({"type": "regex", "regex": "[*+]a{2}+a"}, GrammarError, "multiple repeat at position 8"),
        ({"type": "regex", "regex": "a\\"}, GrammarError, "ends with a backslash"),
        ({"type": "regex", "regex": "a(?=b)"}, GrammarError, "look-ahead"),
        ({"type": "regex", "regex": "\\bword\\b"}, GrammarError, "lookarounds"),
        ({"type": "regex", "regex": "(a)\\1"}, GrammarError, "backreferences"),
        ({"type": "regex", "regex": "a\ud800"}, InvalidRequest, "U+D800, at character 1"),
        ({"type": "choice", "choice": ["\ud800"]}, InvalidRequest, "U+D800"),
        ({"type": "grammar", "grammar": 'start: "\ud800"'}, InvalidRequest, "U+D800"),
        (of_schema({"const": "\ud800"}), GrammarError, "surrogates"),
        ({"type": "grammar", "grammar": 'start: "a"\n  | <[1]>'}, GrammarError, "line 2 names the token <[1]>"),
        ({"type": "grammar", "grammar": 'start: "a" <eos>'}, GrammarError, "names the token <eos>"),
        ({"type": "grammar", "grammar": 'start[temperature=2]: "a"'}, GrammarError, "line 1 has temperature"),
        (
            {"type": "grammar", "grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'},
            GrammarError,
            "line 1 has x-guidance",
        ),
        ({"type": "regex", "regex": "[z-a]"}, GrammarError, "invalid character class range"),
        ({"type": "grammar", "grammar": "start: other"}, GrammarError, "unknown name"),
        (of_schema({"type": "objekt"}), GrammarError, "$.type"),
        (of_schema({"const": "the <eos> token"}), GrammarError, "spells '<eos>'"),
        ({"type": "choice", "choice": ["a", "<bos>"]}, GrammarError, "spells '<bos>'"),
        (of_schema({"not": {"type": "string"}}), GrammarError, "not"),
        (of_schema({"$ref": "#"}), GrammarError, "nothing satisfies it"),
        (of_schema({}, strcit=True), InvalidRequest, "strcit"),
        (of_schema({"enum": list(range(20_000))}), GrammarError, "20000 enum values, the limit is 10000"),
    ],
)
async def test_a_format_that_cannot_be_kept_is_refused_alone(
    tmp_path: Path, response_format: dict[str, Any], error: type[RequestError], message: str
) -> None:
    async with opened(tmp_path) as engine:
        with pytest.raises(error) as caught:
            await engine.generate(prompt="?", sampling=DRAWN, response_format=response_format)
        assert message in caught.value.message
        assert caught.value.param == "response_format"
        assert caught.value.status == 400
        assert (await engine.generate(prompt="?", sampling=SamplingParams(max_tokens=3))).text


@pytest.mark.parametrize("option", [{"ignore_eos": True}, {"beam_width": 2}])
async def test_what_contradicts_a_grammar_is_refused_by_name(tmp_path: Path, option: dict[str, Any]) -> None:
    async with opened(tmp_path) as engine:
        with pytest.raises(UnsupportedFeature) as caught:
            await engine.generate(
                prompt="?", sampling=SamplingParams(max_tokens=9, **option), response_format=of_schema(SCHEMA)
            )
    assert caught.value.param in option


async def test_min_tokens_has_no_say_where_a_grammar_says_when_to_end(tmp_path: Path) -> None:
    params = SamplingParams(min_tokens=50, max_tokens=60)
    async with opened(tmp_path) as engine:
        result = await engine.generate(prompt="?", sampling=params, response_format={"type": "regex", "regex": "ab"})
    assert result.text == "ab"


async def test_a_bias_against_all_that_is_allowed_is_dropped_for_that_token(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=tuple(b"xyz"), bad_words=("a",))
    async with opened(tmp_path) as engine:
        result = await engine.generate(prompt="?", sampling=params, response_format={"type": "regex", "regex": "ab"})
    assert result.text == "ab"


async def test_equal_schemas_are_compiled_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        for _ in range(3):
            await engine.generate(prompt="?", sampling=DRAWN, response_format=of_schema(SCHEMA))
        statistics = await engine.statistics()
    assert statistics["grammars_compiled"] == 1
    assert statistics["grammar_hits"] == 2


async def test_a_request_can_be_aborted_while_its_grammar_is_made(tmp_path: Path) -> None:
    wide = {
        "properties": {f"p{i}": {"type": "string"} for i in range(3000)},
        "required": [f"p{i}" for i in range(3000)],
    }
    async with opened(tmp_path) as engine:
        log = await engine.submit(Generate(prompt="?", sampling=DRAWN, response_format=of_schema(wide)))
        engine.abort(log, "client")
        stream = engine.stream(prompt="?", sampling=SamplingParams(max_tokens=3))
        assert [delta async for delta in stream]
        statistics = await engine.statistics()
    assert log.ended
    assert statistics["grammars_compiling"] == 0
    assert statistics["running"] == 0


async def test_a_document_is_closed_before_its_tokens_are_spent(tmp_path: Path) -> None:
    words = {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2}
    schema = {"type": "object", "properties": {"words": words, "n": {"type": "integer"}}, "required": ["words", "n"]}
    async with opened(tmp_path) as engine:
        for seed, most in enumerate(range(40, 100, 7)):
            result = await engine.generate(
                prompt="?",
                sampling=SamplingParams(max_tokens=most, seed=seed, speculate=seed % 2 * 4),
                response_format=of_schema(schema),
                close_document=True,
            )
            jsonschema.validate(json.loads(result.text), schema)
            assert result.finish_reason == "stop"
            assert len(result.token_ids) <= most


async def test_the_very_last_token_may_close_a_document(tmp_path: Path) -> None:
    wanted = {"type": "regex", "regex": "[a-z]+!"}
    async with opened(tmp_path) as engine:
        for most in range(2, 9):
            result = await engine.generate(
                prompt="?", sampling=SamplingParams(max_tokens=most), response_format=wanted, close_document=True
            )
            assert (len(result.text), result.text[-1], result.finish_reason) == (most, "!", "stop")


@pytest.mark.parametrize(
    ("wanted", "whole"),
    [
        ({"type": "regex", "regex": r"[^@]+@[a-z]+\.com"}, r"[^@]+@[a-z]+\.com"),
        ({"type": "regex", "regex": "[a-z]+x[0-9]+y"}, "[a-z]+x[0-9]+y"),
        ({"type": "regex", "regex": "(.|\n)*~"}, "(?s).*~"),
        ({"type": "grammar", "grammar": 'start: "GO " WORD+ "END"\nWORD: /[a-z]{3,8} /'}, "GO ([a-z]{3,8} )+END"),
        (of_schema({"type": "string", "format": "email"}), r'"[^@]+@[^@]+"'),
        (of_schema({"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"}), '"[a-z]+-[0-9]{2}"'),
    ],
)
async def test_what_is_no_json_is_closed_too(tmp_path: Path, wanted: dict[str, Any], whole: str) -> None:
    async with opened(tmp_path) as engine:
        for seed in range(4):
            params = SamplingParams(max_tokens=30 + seed, seed=seed)
            result = await engine.generate(prompt="?", sampling=params, response_format=wanted, close_document=True)
            assert result.finish_reason == "stop"
            assert re.fullmatch(whole, result.text), result.text


async def test_a_budget_that_no_answer_fits_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        with pytest.raises(InvalidRequest, match=r"takes (\d+) tokens, max_tokens is 9"):
            await engine.generate(
                prompt="?",
                sampling=SamplingParams(max_tokens=9),
                response_format=of_schema(SCHEMA),
                close_document=True,
            )


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "regex", "regex": "[a-z ]{2,6}((a{100}){100}){100}"},
        {"type": "grammar", "grammar": "start: /[a-z ]{2,6}a{20000000}/"},
    ],
)
async def test_a_grammar_that_becomes_too_complex_ends_in_an_error_and_never_as_a_whole_answer(
    tmp_path: Path, response_format: dict[str, Any]
) -> None:
    async with opened(tmp_path) as engine:
        for seed in range(4):
            with pytest.raises(GrammarError) as caught:
                params = SamplingParams(max_tokens=25, seed=seed)
                await engine.generate(prompt="?", sampling=params, response_format=response_format)
            assert caught.value.status == 400
        assert (await engine.generate(prompt="?", sampling=SamplingParams(max_tokens=3))).text
