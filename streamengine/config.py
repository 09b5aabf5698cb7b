"""What a person may set, as frozen values. Unknown keys and impossible numbers fail here, by name."""

from typing import Literal

import msgspec

from streamengine.errors import StartupError

DEFAULT_MODEL = "smollm2-135m"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the core needs to build a runner and a scheduler.

    Args:
        model: a known name (``smollm2-135m``), a folder, a ``.gguf`` file or a hub id.
        dtype: of weights and KV cache; ``auto`` takes bfloat16 where the CPU computes it natively.
        eager: run uncompiled with the reference attention: slow, and the truth.
        attention: ``cpu`` is the C++ kernel, ``reference`` plain PyTorch, ``auto`` the best there is.
        threads: compute threads; ``None`` leaves one core to the event loop and its clients.
        page_size: tokens per KV page.
        kv_pages: size of the pool; ``None`` sizes it from free memory.
        max_model_len: prompt + answer in tokens; ``None`` is the model's own limit.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step; prompts longer than this go in by chunks.
        max_queue: requests that may wait; one more is refused as overloaded.
        offline: never look anything up on the network.
    """

    model: str = DEFAULT_MODEL
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    eager: bool = False
    attention: Literal["auto", "cpu", "reference"] = "auto"
    threads: int | None = None
    page_size: int = 16
    kv_pages: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 512
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise StartupError("model must not be empty", param="model")
        _at_least(1, self, "page_size", "max_num_seqs", "max_num_batched_tokens", "threads", "max_queue")
        _at_least(2, self, "kv_pages", "max_model_len")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step could not give each running request one token",
                param="max_num_batched_tokens",
            )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and under which limits `streamengine serve` listens. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_connections: int = 1024
    max_streams: int = 64
    max_message_bytes: int = 4 * 1024 * 1024
    heartbeat_s: float = 15.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise StartupError(f"port must be 0 to 65535, not {self.port}", param="port")
        _at_least(1, self, "max_connections", "max_streams", "max_message_bytes")
        if "*" in self.allow_origins:
            raise StartupError(
                "allow_origins must name each origin: '*' would let any page drive this server", param="allow_origins"
            )
        if not self.heartbeat_s > 0 or not self.drain_s >= 0:
            raise StartupError("heartbeat_s must be above 0 and drain_s at least 0", param="heartbeat_s")


def _at_least(low: int, config: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise StartupError(f"{name} must be at least {low}, not {value}", param=name)
