"""What a client says. Strict: a misspelt field is an error."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,64}\Z"  # `$` would let a line feed pass at the end
RequestId = Annotated[str, Meta(pattern=ID_PATTERN)]
StreamId = Annotated[str, Meta(pattern=r"^st_[A-Za-z0-9_-]{16,64}\Z")]
TokenId = Annotated[int, Meta(ge=0)]


class _Client(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", forbid_unknown_fields=True
):
    pass


class Init(_Client, frozen=True, tag="init"):
    """Optional, once, first. With ``batch`` the server may put several small messages into one frame."""

    token: Annotated[str, Meta(max_length=8192)] | UnsetType = UNSET
    client: Annotated[str, Meta(max_length=200)] | UnsetType = UNSET
    batch: bool = False


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Server-side deadlines of one request, in seconds."""

    queue_s: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    total_s: Annotated[float, Meta(gt=0)] | UnsetType = UNSET


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a stream is shown to one reader; never changes what is generated."""

    coalesce_ms: Annotated[float, Meta(ge=0, le=1000)] = 0
    coalesce_tokens: Annotated[int, Meta(ge=1, le=1024)] = 1
    window: Annotated[int, Meta(ge=0, le=65536)] = 0
    on_disconnect: Literal["linger", "cancel"] | UnsetType = UNSET
    linger_s: Annotated[float, Meta(ge=0, le=600)] | UnsetType = UNSET
    token_ids: bool = False
    values: bool = False
    pad: Annotated[int, Meta(ge=0, le=256)] | UnsetType = UNSET
    """Absent is what the server pads to by default, 0 is no padding."""


class Generate(_Client, frozen=True, tag="generate"):
    """Start a stream. Exactly one of ``messages``, ``prompt`` (plain text, no template) and ``token_ids``.

    A repeat with the same ``key`` shows the stream that the first one started. ``continues`` are the first tokens of
    an answer that another server began: what follows them is shown, with positions, text and limits of the whole.
    """

    id: RequestId
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    token_ids: Annotated[list[TokenId], Meta(min_length=1)] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    key: Annotated[str, Meta(min_length=8, max_length=128)] | UnsetType = UNSET
    continues: Annotated[list[TokenId], Meta(min_length=1)] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    min_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    typical_p: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop: list[str] | UnsetType = UNSET
    stop_token_ids: list[TokenId] | UnsetType = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    bad_words: list[str | list[TokenId]] | UnsetType = UNSET
    allowed_token_ids: list[TokenId] | UnsetType = UNSET
    logprobs: bool | UnsetType = UNSET
    top_logprobs: int | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType = UNSET
    response_format: dict[str, Any] | UnsetType = UNSET
    close_document: bool | UnsetType = UNSET
    tools: list[Any] | UnsetType = UNSET
    chat_template_kwargs: dict[str, Any] | UnsetType = UNSET
    tool_choice: Any = UNSET
    parallel_tool_calls: bool | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    timeouts: Timeouts | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    delivery: Delivery = Delivery()


class Attach(_Client, frozen=True, tag="attach"):
    """Show an existing stream under this ``id``, from the token after ``after`` on; 0 is the start."""

    id: RequestId
    stream: StreamId
    after: Annotated[int, Meta(ge=0)]
    delivery: Delivery = Delivery()


class Ack(_Client, frozen=True, tag="ack"):
    """The application has taken everything up to token ``seq``; a ``window`` counts from there."""

    id: RequestId
    seq: Annotated[int, Meta(ge=0)]


class Cancel(_Client, frozen=True, tag="cancel"):
    """Stop a request. Unknown or finished ids are ignored: races are normal."""

    id: RequestId
    reason: Annotated[str, Meta(max_length=200)] | UnsetType = UNSET


class Ping(_Client, frozen=True, tag="ping"):
    t: float = 0


ClientMessage = Init | Generate | Attach | Ack | Cancel | Ping
