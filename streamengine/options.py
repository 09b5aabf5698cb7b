"""Command-line options of the frozen config values, written once for all commands.

An option's name, type and default are those of the value's field; only the help is here. Every option of the
engine and of the server can also be set in the environment, as ``STREAMENGINE_`` and its name in capitals.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from streamengine.config import EngineConfig, ServerConfig
from streamengine.request import SamplingParams


@dataclass(frozen=True)
class Group:
    """The options that make one value: ``help`` by field; ``names`` where an option is not called as its field."""

    value: type[msgspec.Struct]
    panel: str
    help: Mapping[str, str]
    names: Mapping[str, str]
    environment: bool = True

    def parameters(self) -> list[inspect.Parameter]:
        hints = get_type_hints(self.value)
        fields = {field.name: field for field in msgspec.structs.fields(self.value)}
        return [self._parameter(fields[name], hints[name]) for name in self.help]

    def build(self, given: dict[str, Any]) -> msgspec.Struct:
        """Take this group's options out of ``given``. Raises the value's own error for what is out of range."""
        chosen = {name: given.pop(name) for name in self.help}
        return self.value(**{name: tuple(it) if isinstance(it, list) else it for name, it in chosen.items()})

    def _parameter(self, field: msgspec.structs.FieldInfo, hint: Any) -> inspect.Parameter:
        option = typer.Option(
            self.names.get(field.name, "--" + field.name.replace("_", "-")),
            help=self.help[field.name],
            envvar=f"STREAMENGINE_{field.name.upper()}" if self.environment else None,
            show_envvar=False,
            rich_help_panel=self.panel,
        )
        default = field.default
        if isinstance(default, tuple):
            hint, default = list[hint.__args__[0]], list(default)
        return inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
        )


ENGINE = Group(
    EngineConfig,
    "Engine",
    {
        "model": "A known name (smollm2-135m), a folder, a .gguf file or a hub id.",
        "dtype": "Of weights and KV cache; auto is bfloat16 where the CPU computes it natively.",
        "eager": "Run uncompiled with the reference attention: slow, and the truth.",
        "attention": "The attention backend.",
        "threads": "Compute threads; by default one core is left to the event loop.",
        "page_size": "Tokens per KV page.",
        "kv_pages": "Size of the KV pool in pages; by default what the free memory holds.",
        "max_model_len": "Prompt + answer in tokens; by default the model's own limit.",
        "max_num_seqs": "Requests that run at once.",
        "max_num_batched_tokens": "Token budget of a step; longer prompts go in by chunks.",
        "max_queue": "Requests that may wait; one more is refused.",
        "offline": "Never look anything up on the network.",
    },
    {"eager": "--eager", "offline": "--offline"},
)

SAMPLING = Group(
    SamplingParams,
    "Sampling",
    {
        "max_tokens": "Answer tokens at most; by default as many as the context holds.",
        "temperature": "0 is greedy.",
        "top_k": "0 is off.",
        "top_p": "1 is off.",
        "min_p": "0 is off.",
        "seed": "The same seed gives the same tokens; by default one is drawn.",
        "stop": "A string that ends the answer and is not part of it; may be repeated.",
        "stop_token_ids": "An id that ends the answer; may be repeated.",
        "ignore_eos": "Go on after the model's end-of-sequence token.",
    },
    {"stop_token_ids": "--stop-token-id", "ignore_eos": "--ignore-eos"},
    environment=False,
)

SERVER = Group(
    ServerConfig,
    "Server",
    {
        "host": "Address to listen on.",
        "port": "0 takes a free one.",
        "allow_origins": "An origin whose pages may connect, besides this server's own; may be repeated.",
        "allow_hosts": "A Host header to answer to, besides the address itself; may be repeated.",
        "max_connections": "WebSockets at once.",
        "max_streams": "Streams at once on one WebSocket.",
        "max_message_bytes": "Size of one message or request body at most.",
        "heartbeat_s": "Seconds of silence after which a heartbeat is sent.",
        "drain_s": "Seconds that running answers may take after SIGTERM.",
    },
    {"allow_origins": "--allow-origin", "allow_hosts": "--allow-host"},
)


def takes(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command's first parameters are the values of ``groups``; on the command line they are their options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[len(groups) :]
        options = [parameter for group in groups for parameter in group.parameters()]

        def run(**given: Any) -> None:
            values = [group.build(given) for group in groups]
            command(*values, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate
