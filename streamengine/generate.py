"""What a user asks for, as one frozen value; numbers of the model's own are for `streamengine.intake`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from streamengine.checks import settle, shown
from streamengine.errors import InvalidRequest
from streamengine.sampling import SamplingParams

MAX_PRIORITY = 100
"""Either way. Ageing makes up for it in `EngineConfig.priority_ageing_s` times so much."""

Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks. Exactly one of ``prompt``, ``messages`` and ``token_ids``.

    Args:
        prompt: plain text, without a template.
        messages: for the model's chat template: ``{"role": …, "content": …}``.
        token_ids: taken as they are.
        queue_s: seconds until the first step at most; then the request ends in `QueueTimeout`.
        total_s: seconds until the end at most; then it is cancelled, with the cause ``timeout``.
        priority: a higher one goes first; waiting raises it.
        tenant: on whose behalf. Tenants share the engine fairly and see nothing of each other's cached prefixes.
        response_format: what the answer must look like, e.g. ``{"type": "json_schema", "json_schema": {"schema":
            {…}}}``; see `streamengine.guided.formats`. Every token keeps to it, so an answer that ends with ``stop``
            is valid; one that ends with ``length`` is the beginning of a valid one.
        close_document: complete the answer while ``max_tokens`` still allows it, so that it always ends with ``stop``.
        tools: what the model may call, in OpenAI's shape; needs ``messages``. An answer that ends with ``tool_calls``
            has whole calls of these, and their arguments keep to the schemas.
        tool_choice: ``auto``, ``none``, ``required``, or the one tool to call.
        parallel_tool_calls: False is one call at most.
        chat_template_kwargs: what else the model's template looks at, e.g. ``{"enable_thinking": False}``; needs
            ``messages``.
        continues: the first tokens of the answer, where another engine began it: it goes on behind them as if it had
            been one from the start, so greedy and seeded answers (`Log.seed`) come out the same. ``max_tokens``,
            ``min_tokens`` and usage count the whole answer.

    Raises:
        InvalidRequest: a field of the wrong type or out of range; messages and ids are looked at by `Intake`.
    """

    prompt: str | None = None
    messages: Sequence[dict[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    sampling: SamplingParams = SamplingParams()
    queue_s: Seconds | None = None
    total_s: Seconds | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    tenant: Annotated[str, Meta(max_length=256)] = ""
    response_format: Mapping[str, Any] | None = None
    close_document: bool = False
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    continues: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"sampling must be SamplingParams, not {shown(self.sampling)}", param="sampling")
        settle(self, InvalidRequest)


class Asked(TypedDict, total=False):
    """The fields of `Generate` but ``prompt``, as keyword arguments."""

    messages: Sequence[dict[str, Any]] | None
    token_ids: Sequence[int] | None
    sampling: SamplingParams
    queue_s: float | None
    total_s: float | None
    priority: int
    tenant: str
    response_format: Mapping[str, Any] | None
    close_document: bool
    tools: Sequence[Any] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    continues: Sequence[int] | None
