"""Command-line options of the frozen config values, written once for all commands.

An option's name, type and default are those of the value's field; only the help is here. Every option of the
engine and of the server can also be set in the environment, as ``STREAMENGINE_`` and its name in capitals.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from streamengine.config import EngineConfig, ServerConfig, TransferConfig
from streamengine.errors import InvalidRequest
from streamengine.sampling import SamplingParams


@dataclass(frozen=True)
class Group:
    """The options that make one value: ``help`` by field; ``names`` where an option is not called as its field."""

    value: type[msgspec.Struct]
    panel: str
    help: Mapping[str, str]
    names: Mapping[str, str]
    environment: bool = True
    parse: Mapping[str, Callable[[list[str]], Any]] = field(default_factory=dict)
    """Fields that a repeated string is made into."""

    def parameters(self) -> list[inspect.Parameter]:
        hints = get_type_hints(self.value)
        fields = {info.name: info for info in msgspec.structs.fields(self.value)}
        return [self._parameter(fields[name], hints[name]) for name in self.help]

    def build(self, given: dict[str, Any]) -> msgspec.Struct:
        """Take this group's options out of ``given``. Raises the value's own error for what is out of range."""
        chosen = {name: self.parse.get(name, _frozen)(given.pop(name)) for name in self.help}
        return self.value(**chosen)

    def _parameter(self, info: msgspec.structs.FieldInfo, hint: Any) -> inspect.Parameter:
        name = self.names.get(info.name, "--" + info.name.replace("_", "-"))
        option = typer.Option(
            f"{name}/--no-{name.removeprefix('--')}" if info.default is True else name,
            help=self.help[info.name],
            envvar=f"STREAMENGINE_{info.name.upper()}" if self.environment else None,
            show_envvar=False,
            rich_help_panel=self.panel,
        )
        default = info.default
        if info.name in self.parse:
            hint, default = list[str], []
        elif isinstance(default, tuple):
            hint, default = list[hint.__args__[0]], list(default)
        return inspect.Parameter(
            info.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
        )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _biases(given: list[str]) -> dict[int | str, float] | None:
    """``ID=BIAS``, each."""
    biases: dict[int | str, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise InvalidRequest(f"logit_bias must be ID=BIAS, not {text!r}", param="logit_bias") from None
    return biases or None


ENGINE = Group(
    EngineConfig,
    "Engine",
    {
        "model": "A known name (smollm2-135m), a folder, a .gguf file or a hub id.",
        "device": "auto is cuda where there is one, else cpu; recording runs what a GPU would on the CPU, for tests.",
        "dtype": "Numbers of weights and KV cache; auto is bfloat16 on a GPU or a CPU that computes it natively.",
        "kv_dtype": "Numbers of the KV cache alone; fp8_e4m3 takes half of the memory, where the attention has it.",
        "eager": "Run uncompiled with the reference attention: slow, the yardstick for the rest.",
        "attention": "The attention backend.",
        "threads": "Compute threads; by default OMP_NUM_THREADS, else both of two cores, and of more all but one.",
        "page_size": "Tokens per KV page.",
        "kv_pages": "Size of the KV pool in pages; by default what the free memory holds.",
        "max_model_len": "Prompt + answer in tokens; by default the model's own limit.",
        "max_num_seqs": "Requests that run at once.",
        "max_num_batched_tokens": "Token budget of a step; longer prompts go in by chunks.",
        "max_queue": "Requests that may wait; one more is refused.",
        "enable_prefix_caching": "Reuse what was computed of a prompt that begins like an earlier one.",
        "prefix_quota": "Share of the pool that one tenant's prefixes may hold while others have some.",
        "long_prefill_token_threshold": "Prompt tokens of one request in one step; by default the whole budget.",
        "target_itl_ms": "Prompts go in by chunks so small that running answers get a token this often.",
        "priority_ageing_s": "Seconds of waiting that count as one priority.",
        "max_n": "Answers that one request may draw.",
        "speculate_tokens": "Tokens guessed per step from a request's own text; 0 is off.",
        "debug": "Poison freed pages and check every invariant after each step: slow.",
        "trace": "File that records what the scheduler saw and decided.",
        "trace_text": "Record token ids as well, not lengths only.",
        "offline": "Never look anything up on the network.",
    },
    {"eager": "--eager", "debug": "--debug", "trace_text": "--trace-text", "offline": "--offline"},
)

SAMPLING = Group(
    SamplingParams,
    "Sampling",
    {
        "max_tokens": "Answer tokens at most; by default as many as the context holds.",
        "min_tokens": "Before so many, nothing but max_tokens ends the answer.",
        "temperature": "0 is greedy.",
        "top_k": "0 is off.",
        "top_p": "1 is off.",
        "min_p": "0 is off.",
        "typical_p": "1 is off.",
        "repetition_penalty": "On tokens of prompt and answer; 1 is off.",
        "presence_penalty": "On tokens of the answer; 0 is off.",
        "frequency_penalty": "On tokens of the answer, as often as they are there; 0 is off.",
        "logit_bias": "ID=BIAS is added to a token's logit; may be repeated.",
        "bad_words": "A text that is not written; may be repeated.",
        "allowed_token_ids": "An id that may be drawn, and no others; may be repeated.",
        "seed": "The same seed gives the same tokens; by default one is drawn.",
        "stop": "A string that ends the answer and is not part of it; may be repeated.",
        "stop_token_ids": "An id that ends the answer; may be repeated.",
        "include_stop_str_in_output": "What ended the answer is part of it.",
        "ignore_eos": "Go on after the model's end-of-sequence token.",
        "logprobs": "Log-probabilities of each token and of so many likeliest ones.",
        "prompt_logprobs": "Log-probabilities of the prompt's tokens, likewise.",
        "n": "Answers to the prompt.",
        "best_of": "Draw so many and give the n likeliest.",
        "beam_width": "Search the likeliest answers with so many beams; 0 is off.",
        "length_penalty": "A beam's score is divided by its length to this power.",
        "speculate": "Tokens guessed per step from the request's own text; by default the engine's setting.",
    },
    {
        "bad_words": "--bad-word",
        "allowed_token_ids": "--allowed-token-id",
        "stop_token_ids": "--stop-token-id",
        "include_stop_str_in_output": "--include-stop-str-in-output",
        "ignore_eos": "--ignore-eos",
    },
    environment=False,
    parse={"bad_words": tuple, "logit_bias": _biases},
)

SERVER = Group(
    ServerConfig,
    "Server",
    {
        "host": "Address to listen on.",
        "port": "0 takes a free one.",
        "allow_origins": "An origin whose pages may connect, besides this server's own; may be repeated.",
        "allow_hosts": "A Host header to answer to, besides the address itself; may be repeated.",
        "api_key_file": "API keys, as TOML; read again when it changes. STREAMENGINE_API_KEYS may hold more.",
        "protect_metrics": "/metrics needs a key as well.",
        "tls_cert": "Certificate chain, as PEM.",
        "tls_key": "Key of the certificate, as PEM.",
        "max_connections": "WebSockets at once.",
        "max_principal_connections": "WebSockets at once of one API key.",
        "max_streams": "Streams at once on one WebSocket.",
        "max_principal_streams": "Running streams of one API key.",
        "max_message_bytes": "Size of one message or request body at most.",
        "ignore_unknown_fields": "OpenAI's routes drop fields that they do not know, in place of refusing them.",
        "max_header_bytes": "Size of the headers of one request at most.",
        "max_log_bytes": "Bytes kept of one stream before log-probabilities that were read are dropped.",
        "max_principal_log_bytes": "Bytes kept of all streams of one API key at most.",
        "message_rate": "Messages of one WebSocket per second, on average.",
        "message_burst": "Messages of one WebSocket at once.",
        "heartbeat_s": "Seconds of silence after which a heartbeat is sent.",
        "retain_s": "Seconds that a stream can be attached to after its end.",
        "linger_s": "Seconds that a stream without a reader runs on.",
        "ack_stall_s": "Seconds that a reader may leave its window full.",
        "idle_s": "Seconds without a request after which a connection is sent away.",
        "max_session_s": "Seconds after which a connection is sent away in any case.",
        "drain_s": "Seconds that running answers may take after SIGTERM.",
        "log_level": "The least important lines that are written to stderr.",
        "log_format": "json is one object a line.",
    },
    {
        "allow_origins": "--allow-origin",
        "allow_hosts": "--allow-host",
        "protect_metrics": "--protect-metrics",
        "ignore_unknown_fields": "--ignore-unknown-fields",
    },
)

TRANSFER = Group(
    TransferConfig,
    "Prefill apart from decode",
    {
        "role": "prefill only computes prompts, for others; decode has its peers compute its own; both does either.",
        "listen": "unix:PATH or HOST:PORT where other engines bring prompts. Not encrypted: for a private network.",
        "peers": "unix:PATH or HOST:PORT of an engine that computes prompts for this one; may be repeated.",
        "prefill_threshold": "Uncached prompt tokens from which on a peer computes them; by default it is measured.",
        "on_load_failure": "If a peer fails: compute the prompt here, or fail; by default fail unless all are unix:.",
        "lease_s": "Seconds after which a peer gives up pages that nobody has asked for.",
        "transfer_deadline_s": "Seconds after which a request goes on without its peer.",
        "kv_transport": "How pages move: shared_memory on one machine, nixl anywhere; in_process: see the API.",
        "peer_key": "Secret that all these engines have; safer as STREAMENGINE_PEER_KEY, where `ps` does not show it.",
        "name": "Name of this engine, for its peers; by default one is drawn.",
    },
    {"peers": "--peer", "name": "--engine-name"},
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
