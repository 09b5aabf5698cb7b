"""From OpenAI's words to the engine's: a request body → what the engine is asked for. Pure."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from streamengine.checks import check_text, exact_integer, shown
from streamengine.engine import Generate
from streamengine.errors import InvalidRequest, ModelNotFound, StreamEngineError, UnsupportedFeature
from streamengine.sampling import MAX_LOGPROBS, SamplingParams
from streamengine.server.openai.requests import Body, ChatRequest, CompletionRequest, TokenizeRequest
from streamengine.tokenizer import Tokenizer, read_messages

MAX_PROMPTS = 128
"""Of one call."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, of ``/v1/completions``; a chat's answer may be as long as the context."""

SAME = (set(SamplingParams.__struct_fields__) & set(Body.__struct_fields__)) - {"stop"}
"""They have one name and one meaning on both sides."""

ROLES = ("system", "developer", "user", "assistant", "tool")

STRUCTURES = ("json", "regex", "grammar", "choice")
"""What vLLM asks for as ``guided_json`` and so on, or else in ``structured_outputs``."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
}
"""Fields that are known and that this engine cannot obey, with the values that ask for what happens anyway."""


def check_model(asked: str | None, model: str) -> None:
    if asked is not None and asked != model:
        raise ModelNotFound(f"model {shown(asked)} is not served here, only {model!r}", param="model")


def check_body(body: Body, model: str) -> None:
    """What can be told from a body alone.

    Raises:
        ModelNotFound: another model is asked for.
        UnsupportedFeature, InvalidRequest: by field.
    """
    check_model(body.model, model)
    _check_neutral(body)
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", param="stream_options")
    if options is not None and options.include_obfuscation not in (None, False):
        name = "stream_options.include_obfuscation"
        raise UnsupportedFeature(f"{name} is not supported by this engine", param=name)
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedFeature("prompt_logprobs cannot be streamed", param="prompt_logprobs")


def in_words_of(body: Body, error: StreamEngineError) -> StreamEngineError:
    """``error`` about the fields that ``body`` has, where the engine calls them otherwise."""
    name = _names(body).get(error.param or "")
    if name is None:
        return error
    message = re.sub(rf"\b{error.param}\b", name, error.message)
    return type(error)(message, param=name, **error.details)


def _names(body: Body) -> dict[str, str]:
    """The engine's name of a field → the client's."""
    names = {}
    if formats := _formats(body):
        names["response_format"] = formats[0][0]
    if isinstance(body, ChatRequest) and body.max_tokens is None and body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if isinstance(body, CompletionRequest):
        names["token_ids"] = "prompt"
        if body.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
    return names


def chat_generate(body: ChatRequest) -> Generate:
    """What a chat asks for. Raises `RequestError` by field."""
    _check_roles(body.messages)
    tokens, newer = body.max_tokens, body.max_completion_tokens
    if tokens is not None and newer is not None and tokens != newer:
        text = f"max_tokens {tokens} and max_completion_tokens {newer} are two names of one number"
        raise InvalidRequest(text, param="max_completion_tokens")
    top = body.top_logprobs or 0
    exact_integer("top_logprobs", top, 0, MAX_LOGPROBS)
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
    sampling = _sampling(body, max_tokens=tokens if newer is None else newer, logprobs=top if body.logprobs else None)
    tools = {}
    if body.tools or body.tool_choice not in (None, "none", "auto"):
        tools = {name: getattr(body, name) for name in ("tools", "tool_choice", "parallel_tool_calls")}
    options = body.chat_template_kwargs
    return Generate(
        messages=tuple(body.messages), sampling=sampling, chat_template_kwargs=options, **_common(body), **tools
    )


def completion_generates(body: CompletionRequest) -> list[Generate]:
    """What a completion asks for: one for each prompt. Raises `RequestError` by field."""
    tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.stream and body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedFeature("best_of cannot be streamed: which are best is known at the end", param="best_of")
    more = {} if body.best_of is None else {"best_of": body.best_of}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        more["prompt_logprobs"] = body.logprobs
    sampling = _sampling(body, max_tokens=tokens, logprobs=body.logprobs, **more)
    common = _common(body)
    return [Generate(**prompt, sampling=sampling, **common) for prompt in _prompts(body.prompt)]


def tokenizing(body: TokenizeRequest, tokenizer: Tokenizer) -> Callable[[], list[int]]:
    """What gives the ids, and may take seconds. A text gets the vocabulary's special tokens unless it is not to.

    Raises:
        RequestError: by field; the call as well.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
    _check_neutral(body)
    if body.prompt is not None:
        prompt = check_text(body.prompt, "prompt")
        if body.chat_template_kwargs:
            raise InvalidRequest("chat_template_kwargs need messages", param="chat_template_kwargs")
        return partial(tokenizer.encode if body.add_special_tokens in (None, True) else tokenizer.encode_part, prompt)
    if body.add_special_tokens:
        raise UnsupportedFeature("add_special_tokens: the template writes them", param="add_special_tokens")
    messages = read_messages(body.messages)
    _check_roles(messages)
    return partial(tokenizer.chat, messages, options=body.chat_template_kwargs or {})


def _check_roles(messages: Sequence[Any]) -> None:
    """Templates write whatever they get; a role that a client misspells would be one of its own."""
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role not in ROLES:
            name = f"messages[{index}].role"
            raise InvalidRequest(f"{name} must be one of {', '.join(ROLES)}, not {shown(role)}", param=name)


def _check_neutral(body: msgspec.Struct) -> None:
    for name, accepted in NEUTRAL.items():
        given = getattr(body, name, None)
        if given is not None and given not in accepted:
            raise UnsupportedFeature(f"{name} {shown(given)} is not supported by this engine", param=name)


def _sampling(body: Body, **more: Any) -> SamplingParams:
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    return SamplingParams(**{**given, "stop": tuple(stop), **more})


def _common(body: Body) -> dict[str, Any]:
    response_format = _response_format(body)
    return {
        "priority": body.priority or 0,
        "response_format": None if response_format == {"type": "text"} else response_format,
        "close_document": body.close_document or False,
    }


def _formats(body: Body) -> list[tuple[str, str, Any]]:
    """Under vLLM's names: the name, what it is, and what is wanted."""
    asked = [(f"guided_{kind}", kind, getattr(body, f"guided_{kind}")) for kind in STRUCTURES]
    asked += [(f"structured_outputs.{kind}", kind, value) for kind, value in (body.structured_outputs or {}).items()]
    return [one for one in asked if one[2] is not None]


def _response_format(body: Body) -> dict[str, Any] | None:
    asked = _formats(body)
    if not asked:
        return body.response_format
    name, kind, value = asked[0]
    if len(asked) > 1 or body.response_format is not None:
        raise InvalidRequest("an answer has one format: response_format or another", param=name)
    if kind not in STRUCTURES:
        raise UnsupportedFeature(f"{name} is not supported by this engine", param=name)
    if kind != "json":
        return {"type": kind, kind: value}
    return {"type": "json_schema", "json_schema": {"schema": _schema(value, name)}}


def _schema(value: Any, name: str) -> Any:
    """vLLM takes a schema as a text too."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no JSON: {error}", param=name) from error


def _prompts(prompt: str | list[str | int | list[int]]) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        found = "an empty list" if not prompt else "a mixed one"
        raise InvalidRequest(f"prompt must be a list of texts, of ids or of lists of ids, not {found}", param="prompt")
    if kinds == {int}:
        return [{"token_ids": msgspec.convert(prompt, tuple[int, ...])}]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS}", param="prompt")
    name = "prompt" if kinds == {str} else "token_ids"
    return [{name: msgspec.convert(item, str | tuple[int, ...])} for item in prompt]
