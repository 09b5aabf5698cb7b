"""One Ray cluster for all tests of this folder, in this process's network namespace, which should be one of its own."""

import os
import secrets
import signal
import socket
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if util.find_spec("ray") else ["test_*.py"]
"""Ray has an environment of its own: `make test-ray`."""

PORT = 8123
DRAIN_S = 4.0
MARK = f"STREAMENGINE_FLEET={secrets.token_hex(8)}"


class Fleet:
    """What runs, and what may happen to it."""

    url = f"http://127.0.0.1:{PORT}"

    def deploy(self, replicas: int, **more: Any) -> None:
        """Bring it to so many; returns when they are there, while others may still be going."""
        from ray import serve

        from streamengine import serve_ray

        given = {"cpus": 0.1, "engine": "tests.fleet.engines:open_engine", "max_num_seqs": 64, "drain_s": DRAIN_S}
        application = serve_ray.app({"replicas": replicas, "port": PORT, **given, **more})
        serve.run(application, name=serve_ray.NAME, route_prefix="/")

    def replicas(self) -> list[int]:
        """Their processes: those of this cluster that Ray named so."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                named = (process / "cmdline").read_bytes().startswith(b"ray::ServeReplica")
                ours = MARK.encode() in (process / "environ").read_bytes()
            except OSError:
                continue  # it is gone, or somebody else's
            if named and ours:
                found.append(int(process.name))
        return found

    def name(self, process: int) -> str:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode()

    def kill(self, process: int) -> None:
        os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    from streamengine.fleet import prefer_haproxy

    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        pytest.skip("Ray's proxies listen on every interface: run `make test-ray`, which gives them a namespace")
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    prefer_haproxy(DRAIN_S)
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        options = {"host": "127.0.0.1", "port": PORT, "request_timeout_s": None}
        serve.start(proxy_location="HeadOnly", http_options=options)
        yield Fleet()
    finally:
        serve.shutdown()
        ray.shutdown()
