"""What a person may set, as frozen values. Unknown keys and impossible numbers fail here, by name."""

import ipaddress
import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from streamengine.checks import MANY, settle
from streamengine.errors import StartupError

DEFAULT_MODEL = "smollm2-135m"

Count = Annotated[int, Meta(ge=1, le=MANY)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]

MAX_SOCKET_PATH = 107
"""Bytes; the kernel takes no more."""

_NO_ADDRESS = "is neither unix:PATH nor HOST:PORT"


def is_loopback(host: str) -> bool:
    """Whether listening on ``host`` reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _wrong_address(address: str) -> str | None:
    path = address.removeprefix("unix:")
    if path != address:
        if not path:
            return _NO_ADDRESS
        size = len(path.encode())
        return f"has a path of {size} bytes, sockets take at most {MAX_SOCKET_PATH}" if size > MAX_SOCKET_PATH else None
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        return _NO_ADDRESS
    return None if int(port) < 2**16 else f"has port {port}, at most {2**16 - 1} is one"


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill apart from decode: which part of it this engine has. Times in seconds.

    An address is ``unix:PATH``, which is this user's alone, or ``HOST:PORT``. Whoever can connect to one, and has the
    key where there is one, can have prompts computed and read the KV cache. Nothing is encrypted, so ``HOST:PORT``
    belongs on a private network.

    Args:
        role: ``prefill`` computes prompts for other engines, and nothing else; ``decode`` answers requests, whose
            prompts its peers may compute; ``both`` does what its addresses allow.
        listen: address where other engines bring prompts.
        peers: addresses of engines that compute prompts for this one.
        prefill_threshold: prompt tokens without those in the prefix cache from which on a peer computes a prompt;
            None: from where that was observed to take half the time of this engine's own steps, or less.
        on_load_failure: whether a request whose remote prefill fails is computed here, or ends in an error; None
            recomputes where all peers are on this machine, and fails elsewhere, where to be slow without a word would
            hide a fault of a network.
        lease_s: a peer gives pages up that nobody has asked for within this time.
        transfer_deadline_s: a request whose prompt is not here by then goes on without.
        kv_transport: how pages move: ``shared_memory`` on one machine, ``nixl`` anywhere, ``in_process`` between
            engines whose cores are threads of one process (`open_engine` with ``process=False``).
        peer_key: a secret that engines prove to each other to have before either says anything else; None where
            whoever can connect may.
        name: of this engine, for its peers; None draws one at each start.
    """

    role: Literal["both", "prefill", "decode"] = "both"
    listen: Text | None = None
    peers: tuple[Text, ...] = ()
    prefill_threshold: Count | None = None
    on_load_failure: Literal["recompute", "fail"] | None = None
    lease_s: Annotated[float, Meta(ge=0.1, le=3600)] = 15.0
    transfer_deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    kv_transport: Literal["shared_memory", "nixl", "in_process"] = "shared_memory"
    peer_key: Annotated[str, Meta(min_length=8, max_length=8192)] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None

    def __post_init__(self) -> None:
        settle(self, StartupError)
        wanted = {"prefill": "listen", "decode": "peers"}.get(self.role)
        if wanted is not None and not getattr(self, wanted):
            option = wanted.removesuffix("s")
            raise StartupError(f"role {self.role} needs {wanted}: --{option} unix:PATH or HOST:PORT", param=wanted)
        unwanted = {"prefill": {"peers"}, "decode": {"listen"}}.get(self.role, set())
        if not self.peers:
            unwanted |= {"prefill_threshold", "on_load_failure", "lease_s", "transfer_deadline_s"}
        if self.alone:
            unwanted |= {"kv_transport", "peer_key", "name"}
        for field in structs.fields(self):
            if field.name in unwanted and getattr(self, field.name) != field.default:
                alone = f"role {self.role}" if self.peers else f"role {self.role}, without peers,"
                given = " (STREAMENGINE_PEER_KEY may be set)" if field.name == "peer_key" else ""
                raise StartupError(f"{alone} has no use for {field.name}{given}", param=field.name)
        for param, addresses in (("listen", (self.listen,) if self.listen else ()), ("peers", self.peers)):
            for address in addresses:
                if wrong := _wrong_address(address):
                    raise StartupError(f"{address!r} {wrong}", param=param)

    @property
    def alone(self) -> bool:
        """It has nothing to do with other engines."""
        return self.listen is None and not self.peers

    @property
    def recomputes(self) -> bool:
        """See ``on_load_failure``."""
        if self.on_load_failure is None:
            return all(peer.startswith("unix:") for peer in self.peers)
        return self.on_load_failure == "recompute"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the core needs to build a runner and a scheduler.

    Args:
        model: a known name (``smollm2-135m``), a folder, a ``.gguf`` file or a hub id.
        device: ``auto`` is ``cuda`` where there is one and FlashInfer, else ``cpu``; ``recording`` runs what a GPU
            would on the CPU, for tests.
        dtype: of weights and KV cache; ``auto`` takes bfloat16 on a GPU, and where the CPU computes it natively.
        kv_dtype: of the KV cache alone: ``fp8_e4m3`` takes half of the memory, where the attention has it;
            scaled by the checkpoint's factors where it has some.
        eager: run uncompiled with the reference attention: slow, and the truth.
        attention: ``flashinfer`` is for GPUs, ``cpu`` the C++ kernel, ``reference`` plain PyTorch, ``auto`` the best
            there is.
        threads: compute threads; ``None`` is ``OMP_NUM_THREADS`` where it is set, else both of two cores, and of more
            all but one, which is left to the event loop and its clients.
        page_size: tokens per KV page.
        kv_pages: size of the pool; ``None`` sizes it from free memory.
        max_model_len: prompt + answer in tokens; ``None`` is the model's own limit.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step; prompts longer than this go in by chunks.
        max_queue: requests that may wait; one more is refused as overloaded.
        enable_prefix_caching: pages of a prompt that was computed before are used again, within one tenant.
        prefix_quota: share of the pool that one tenant's cached prefixes may hold while others have some.
        long_prefill_token_threshold: prompt tokens of one request in one step at most; ``None`` is the whole budget.
        target_itl_ms: prompts go in by chunks small enough that running answers get a token this often; ``None``: by
            chunks as large as a step.
        priority_ageing_s: after so many seconds of waiting a request counts as one priority higher.
        max_n: answers that one request may draw.
        speculate_tokens: guess so many tokens per step from a request's own text, where it does not say itself.
        debug: poison freed pages and check every invariant after each step: slow.
        trace: file that records what the scheduler saw and decided, for `streamengine replay`.
        trace_text: record token ids as well; without, a trace holds lengths only.
        offline: never look anything up on the network.
        transfer: this engine's part in prefill apart from decode; None: it is alone.
    """

    model: Text = DEFAULT_MODEL
    device: Literal["auto", "cpu", "cuda", "recording"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    eager: bool = False
    attention: Literal["auto", "cpu", "flashinfer", "reference"] = "auto"
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    kv_pages: Annotated[int, Meta(ge=2, le=MANY)] | None = None
    max_model_len: Annotated[int, Meta(ge=2, le=MANY)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 512
    max_queue: Count = 512
    enable_prefix_caching: bool = True
    prefix_quota: Annotated[float, Meta(gt=0, le=1)] = 0.5
    long_prefill_token_threshold: Count | None = None
    target_itl_ms: Annotated[float, Meta(gt=0, le=1e6)] | None = 200.0
    priority_ageing_s: Annotated[float, Meta(gt=0, le=1e9)] = 60.0
    max_n: Count = 16
    speculate_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    debug: bool = False
    trace: Text | None = None
    trace_text: bool = False
    offline: bool = False
    transfer: TransferConfig | None = None

    def __post_init__(self) -> None:
        for name in ("model", "trace"):
            if isinstance(path := getattr(self, name), os.PathLike):
                structs.force_setattr(self, name, os.fspath(path))
        settle(self, StartupError)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step could not give each running request one token",
                param="max_num_batched_tokens",
            )
        if self.trace_text and self.trace is None:
            raise StartupError("trace_text needs trace, the name of a file", param="trace")
        if self.transfer is not None and self.transfer.alone:
            structs.force_setattr(self, "transfer", None)
        if self.trace is not None and self.transfer is not None:
            raise StartupError("a trace is of one engine alone: it cannot be with transfer", param="trace")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and under which limits `streamengine serve` listens. Times in seconds, sizes in bytes.

    A principal is whoever one API key stands for. Its own limits hold where there are keys; without, everybody is
    the same and only those of the whole server hold, and those of one connection.

    Args:
        allow_origins: origins whose pages may connect or read answers, besides this server's own.
        allow_hosts: Host headers that are answered, besides the address itself.
        api_key_file: file of API keys, see `streamengine.server.identity`; it is read again when it changes.
        protect_metrics: ``/metrics`` needs a key as well.
        tls_cert: file of the certificate chain; with ``tls_key`` the server speaks TLS.
        max_connections: WebSockets at once.
        max_principal_connections: those of one principal.
        max_streams: open requests on one WebSocket.
        max_principal_streams: running requests of one principal.
        max_message_bytes: one message, or one request body.
        ignore_unknown_fields: OpenAI's routes drop fields that they do not know, in place of refusing them: for
            routers in front that add their own.
        max_header_bytes: line and headers of one request.
        max_log_bytes: what one stream's log-probabilities may hold before those that were read are dropped.
        max_principal_log_bytes: what all streams of one principal may hold; beyond it nothing new is taken.
        message_rate: messages of one WebSocket per second, on average; ``message_burst`` at once.
        retain_s: how long a stream can be attached to after its end.
        linger_s: how long one that lost its last reader runs on, unless the reader said otherwise.
        ack_stall_s: how long a reader may leave its window full.
        idle_s: after so long without a request a connection is sent away.
        max_session_s: after so long a connection is sent away in any case, and can come back.
    """

    host: Annotated[str, Meta(max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    api_key_file: Text | None = None
    protect_metrics: bool = False
    tls_cert: Text | None = None
    tls_key: Text | None = None
    max_connections: Count = 1024
    max_principal_connections: Count = 32
    max_streams: Count = 64
    max_principal_streams: Count = 512
    max_message_bytes: Count = 4 * 1024 * 1024
    ignore_unknown_fields: bool = False
    max_header_bytes: Count = 32 * 1024
    max_log_bytes: Count = 8 * 1024 * 1024
    max_principal_log_bytes: Count = 64 * 1024 * 1024
    message_rate: Annotated[float, Meta(gt=0, le=1e9)] = 50.0
    message_burst: Count = 200
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=3600)] = 15.0
    retain_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    linger_s: Annotated[float, Meta(ge=0, le=600)] = 15.0
    ack_stall_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    idle_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    max_session_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        settle(self, StartupError)
        if "*" in self.allow_origins:
            raise StartupError(
                "allow_origins must name each origin: '*' would let any page drive this server", param="allow_origins"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise StartupError(f"{missing} is missing: TLS needs a certificate and its key", param=missing)
