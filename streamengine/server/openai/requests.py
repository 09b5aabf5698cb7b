"""Request bodies of OpenAI's routes, typed. A field that is not here is refused by its name.

Names and meanings are OpenAI's; those under "extensions" are vLLM's. ``null`` is as good as absent, because
clients send it. Ranges are for `SamplingParams` and the engine to know.
"""

from typing import Any, TypeVar, cast

import msgspec

B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the two kinds of completion have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: "StreamOptions | None" = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str | list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    close_document: bool | None = None
    # They cannot change an answer.
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # Taken if they ask for what happens anyway: see `translate.NEUTRAL`.
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``continuous_usage_stats`` is vLLM's: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class ChatRequest(Body, frozen=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Taken if they ask for what happens anyway.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    store: Any = None
    add_generation_prompt: Any = None


class CompletionRequest(Body, frozen=True):
    """``POST /v1/completions``. A list in ``prompt`` is one of texts, of ids, or of lists of ids."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    # Taken if they ask for what happens anyway.
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/tokenize``: one of ``prompt`` and ``messages``. The names are vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/detokenize``."""

    model: str | None = None
    tokens: list[int]


def lenient(kind: type[B]) -> type[B]:
    """``kind`` that drops the fields which it does not know, those of its options included."""
    options: Any = _dropping(StreamOptions)
    made: Any = _dropping(kind, [("stream_options", options | None, None)])
    return cast(type[B], made)


def _dropping(kind: type[msgspec.Struct], fields: Any = ()) -> type[msgspec.Struct]:
    name = f"Lenient{kind.__name__}"
    return msgspec.defstruct(name, fields, bases=(kind,), forbid_unknown_fields=False, frozen=True, kw_only=True)
