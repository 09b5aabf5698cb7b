"""Replicas on Ray Serve: each is a whole server of ours behind Ray's proxy. Ray places them and starts them again.

What a replica serves (WebSocket, HTTP, page) is the ASGI application of `streamengine.server`, so whatever holds for
one server holds here. A replica that dies, or is stopped before its answers are complete, closes its sockets; the SDK
then continues them at another one (see `Generate.continues`). A socket is one ongoing request of Ray's for its whole
life, so its limit is ours on connections, and the fleet grows by what waits and by full KV caches, not by open sockets.

Needs the extra ``ray``. Some of this is not in Ray's stable interface, so its versions are bounded.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from importlib import import_module
from typing import Any, TypeVar

import anyio
import msgspec
import ray
from anyio.from_thread import start_blocking_portal
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.types import ASGIApp, Receive, Scope, Send

from streamengine.config import EngineConfig, ServerConfig, TransferConfig, is_loopback
from streamengine.engine import Engine
from streamengine.errors import EngineFailure, StartupError, UnsupportedFeature
from streamengine.scaling import Fleet, Load, wanted_replicas
from streamengine.server.app import create_app
from streamengine.server.identity import ENVIRONMENT, Keys
from streamengine.server.service import Service

VERSIONS = ((2, 60), (2, 70))
"""From, and below: the replica's drain and the autoscaling policy were read in these."""

NAME = "streamengine"
LOOK_S = 0.25
"""How often a replica looks whether Ray is stopping it, which Ray does not say."""

GRACE_S = 15.0
"""Beyond the drain: for clients to read the rest, and for the core to end."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
PREFIX = "streamengine-"
"""Of a folder that is this user's alone."""

RAYS_OWN = ("tls_cert", "tls_key", "max_header_bytes", "log_level", "log_format")
"""What its proxies and its logs do, and a replica cannot."""

OpenEngine = Callable[[EngineConfig], AbstractAsyncContextManager[Engine]]


def app(args: dict[str, Any]) -> Any:
    """Ray's application, for ``serve run streamengine.serve_ray:app`` and configuration files.

    Args:
        args: fields of `Fleet`, `EngineConfig` and `ServerConfig` by their names; no name is in two of them.

    Raises:
        StartupError: an unknown field or a value out of range, or a version of Ray that this was not written for.
    """
    names = {*Fleet.__struct_fields__, *EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    if unknown := args.keys() - names:
        raise StartupError(f"unknown: {', '.join(sorted(unknown))}", param=min(unknown))
    try:
        return build(_taken(args, Fleet), _taken(args, EngineConfig), _taken(args, ServerConfig))
    except msgspec.ValidationError as error:
        raise StartupError(str(error)) from error


def _taken(args: dict[str, Any], kind: type[T]) -> T:
    given = {name: args[name] for name in getattr(kind, "__struct_fields__", ()) if name in args}
    return msgspec.convert(given, kind, strict=False)


def build(fleet: Fleet, config: EngineConfig, server: ServerConfig, folder: str | None = None) -> Any:
    """The same from values; with prefill replicas, engines meet in ``folder``, or else in one that is left behind.

    Raises:
        StartupError: this was not written for the version of Ray.
        UnsupportedFeature: prefill replicas in a cluster of several machines; what is Ray's own.
    """
    check_version(ray.__version__)
    for field in msgspec.structs.fields(ServerConfig):
        if field.name in RAYS_OWN and getattr(server, field.name) != field.default:
            raise UnsupportedFeature(f"{field.name} is for a server by itself: Ray has its own", param=field.name)
    scale: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas not in (None, fleet.replicas):
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fleet.replicas,
                initial_replicas=fleet.replicas,
                max_replicas=fleet.max_replicas,
                metrics_interval_s=1.0,
                look_back_period_s=5.0,
                upscale_delay_s=5.0,
                downscale_delay_s=60.0,
                policy=AutoscalingPolicy(policy_function="streamengine.serve_ray:by_load"),
            )
        }
    common: dict[str, Any] = {
        "health_check_period_s": 2.0,
        "ray_actor_options": {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
    }
    given = msgspec.to_builtins(server)
    prefill: tuple[Any, ...] = ()
    if fleet.prefill:
        config, prompts = _apart(config, fleet, folder or tempfile.mkdtemp(prefix=PREFIX))
        deployment = serve.deployment(name=f"{NAME}-prefill", num_replicas=fleet.prefill, **common)
        prefill = (deployment(Prefill).bind(msgspec.to_builtins(prompts), fleet.engine),)
    deployment = serve.deployment(
        name=NAME,
        # One socket is one request, however many answers it brings and however long it is idle.
        max_ongoing_requests=server.max_connections,
        graceful_shutdown_timeout_s=server.drain_s + _deregistration_s() + GRACE_S,
        graceful_shutdown_wait_loop_s=LOOK_S,
        **common,
        **scale,
    )
    keys = os.environ.get(ENVIRONMENT, "")  # a replica's environment is that of its node, where there may be none
    return deployment(Replica).bind(msgspec.to_builtins(config), given, keys, fleet.engine, *prefill)


def _apart(config: EngineConfig, fleet: Fleet, folder: str) -> tuple[EngineConfig, EngineConfig]:
    """The configs of who answers and of who computes prompts. They meet at sockets in a folder, by rank, so that one
    that is started anew is found where the dead one was. Ray carries none of it.
    """
    if config.transfer is not None:
        raise StartupError("transfer is the fleet's own where it has prefill replicas", param="transfer")
    if ray.is_initialized() and len(nodes := [node for node in ray.nodes() if node["Alive"]]) > 1:
        text = f"prefill replicas meet the others through shared memory on one machine; this cluster has {len(nodes)}"
        raise UnsupportedFeature(text, param="prefill", nodes=len(nodes))
    addresses = tuple(f"unix:{folder}/{rank}" for rank in range(fleet.prefill))
    answers = TransferConfig(role="decode", peers=addresses, prefill_threshold=fleet.prefill_threshold)
    prompts = TransferConfig(role="prefill", listen=addresses[0])
    return msgspec.structs.replace(config, transfer=answers), msgspec.structs.replace(config, transfer=prompts)


def check_version(version: str) -> None:
    """Raises `StartupError`."""
    least, below = VERSIONS
    if not least <= tuple(int(part) for part in version.split(".")[:2]) < below:
        bounds = f">={least[0]}.{least[1]},<{below[0]}.{below[1]}"
        raise StartupError(f"ray {version} is installed; this was written for ray[serve]{bounds}")


def _deregistration_s() -> float:
    """How long Ray keeps the sockets of a replica that is being stopped, where they come through HAProxy."""
    return float(os.environ.get("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "30"))


def by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: see `wanted_replicas`."""
    metrics: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
    names = Load.__struct_fields__
    known = [id for id in context.running_replicas if all(id in metrics.get(name, ()) for name in names)]
    if len(known) < len(context.running_replicas):
        return context.target_num_replicas, {}  # a replica that was just started has said nothing yet
    loads = [Load(**{name: metrics[name][id] for name in names}) for id in known]
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return wanted_replicas(loads, least, most), {}


@serve.ingress()
class Replica:
    """One server. Ray makes it, from configs as plain values, and calls its methods by their names."""

    def __init__(
        self, config: dict[str, Any], server: dict[str, Any], keys: str, open_engine: str, prefill: object = None
    ) -> None:
        """``prefill`` are replicas that Ray is to start before this one."""
        self._config = msgspec.convert(config, EngineConfig)
        server_config = msgspec.convert(server, ServerConfig)
        self._open: OpenEngine = _imported(open_engine)
        self._service = Service(server_config, Keys(server_config, keys))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        serve_connection = create_app(self._service)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (self._live(receive, send) if scope["type"] == "lifespan" else serve_connection(scope, receive, send))

        return app

    async def _live(self, receive: Receive, send: Send) -> None:
        """From Ray's word that the replica is to start to its word that no request is left."""
        await receive()
        async with self._open(self._config) as engine, anyio.create_task_group() as tasks:
            tasks.start_soon(self._service.open(engine).run)
            tasks.start_soon(self._drain_when_stopped)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            tasks.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _drain_when_stopped(self) -> None:
        while not _is_being_stopped():  # noqa: ASYNC110 - there is nothing to wait for: Ray does not say it
            await anyio.sleep(LOOK_S)
        await self._service.drain()

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises: one whose core is dead. Its clients are told before."""
        if self._service.status == "failed" and self._service.engine is not None:
            await self._service.fail()
            raise EngineFailure(str(await self._service.engine.wait_failed()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """See `Load`."""
        engine = self._service.engine
        if engine is None or engine.status != "ready":
            return {}
        counts = await engine.statistics()
        return {
            "running": counts["running"],
            "waiting": counts["waiting"] + counts["engine_preparing"],
            "seats": float(engine.config.max_num_seqs),
            "kv_used": counts["kv_pages_used"] / max(1, engine.kv.pages - 1),
        }


class Prefill:
    """One engine that computes prompts, in a thread with its own event loop: no request comes to it through Ray."""

    def __init__(self, config: dict[str, Any], open_engine: str) -> None:
        self._stack = ExitStack()
        opened = _imported(open_engine)(_at_its_place(msgspec.convert(config, EngineConfig)))
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name="streamengine-prefill"))
            self._engine: Engine = stack.enter_context(portal.wrap_async_context_manager(opened))
            self._stack = stack.pop_all()

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises: one whose core is dead."""
        if self._engine.status == "failed":
            raise EngineFailure("the core is dead")

    def __del__(self) -> None:
        self._stack.close()


def _at_its_place(config: EngineConfig) -> EngineConfig:
    """Where a prefill replica listens goes by its rank."""
    transfer = config.transfer
    if transfer is None or transfer.listen is None:
        return config
    rank = serve.get_replica_context().rank.rank
    address = f"{transfer.listen.rpartition('/')[0]}/{rank}"
    return msgspec.structs.replace(config, transfer=msgspec.structs.replace(transfer, listen=address))


def _is_being_stopped() -> bool:
    """Ray waits until no request of this replica is left, and tells it nothing; but it knows that it does."""
    from ray._private.worker import global_worker  # private: see `VERSIONS`

    actor = global_worker.actors.get(global_worker.actor_id)
    return bool(actor is not None and actor._replica_impl._shutting_down)


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def run(fleet: Fleet, config: EngineConfig, server: ServerConfig, *, ready: Callable[[str], None]) -> None:
    """Start a fleet, on the cluster of ``RAY_ADDRESS`` or else on one of this machine's own, and serve until SIGTERM or
    SIGINT has drained it.

    Raises:
        StartupError: the cluster is of another version, or a replica cannot start.
    """
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        # Without an address Ray would join whatever cluster was last started on this machine.
        address = os.environ.get("RAY_ADDRESS", "local")
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        try:
            application = build(fleet, config, server, folder)
            options = {"host": server.host, "port": server.port, "request_timeout_s": None}
            serve.start(proxy_location="EveryNode", http_options=options)
            serve.run(application, name=NAME, route_prefix="/")
            _warn_of_strangers(server)
            ready(f"http://{server.host}:{server.port}")
            anyio.run(_until_signal)
        except RuntimeError as error:
            raise StartupError(f"the fleet did not start: {error}") from error
        finally:
            serve.shutdown()
            ray.shutdown()


def _warn_of_strangers(server: ServerConfig) -> None:
    everywhere = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"  # it knows no other address
    if (everywhere or not is_loopback(server.host)) and not Keys(server, os.environ.get(ENVIRONMENT, "")).needed:
        where = "any address of this machine" if everywhere else server.host
        logger.warning("anybody who reaches %s may use this fleet: there are no API keys", where)


async def _until_signal() -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for _ in received:
            return
