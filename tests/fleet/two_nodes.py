"""A cluster of two nodes, each in a network namespace of its own, joined by a pair of virtual links. Run as
``unshare -n python -m tests.fleet.two_nodes``: prints ``done`` if one node's replica went on with the answers of the
other one, which was killed with its node."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import pytest

HEAD, OTHER, PORT = "10.91.0.1", "10.91.0.2", 8123
RAY = str(Path(sys.executable).with_name("ray"))
TOKENS, ANSWERS = 200, 8


def link(other: int) -> None:
    """This namespace and that of process ``other`` can reach each other."""
    there = ["nsenter", "-t", str(other), "-n"]
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(other)],
        ["ip", "addr", "add", f"{HEAD}/24", "dev", "here"],
        ["ip", "link", "set", "here", "up"],
        [*there, "ip", "link", "set", "lo", "up"],
        [*there, "ip", "addr", "add", f"{OTHER}/24", "dev", "there"],
        [*there, "ip", "link", "set", "there", "up"],
    ):
        subprocess.run(command, check=True)


def start_node(stack: ExitStack, address: str, *options: str, inside: list[str]) -> subprocess.Popen[bytes]:
    """A node, in a session of its own."""
    plain = ["--num-cpus=1", f"--node-ip-address={address}", "--object-store-memory=80000000", "--block"]
    command = [*inside, RAY, "start", *options, *plain]
    node = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr, stderr=sys.stderr)
    stack.callback(end, node)
    return node


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)


async def use(kill: int) -> None:
    """Half of the clients come through each node's proxy; then the other node dies."""
    from streamengine_sdk import AsyncClient, Backoff
    from streamengine_sdk.events import Delta
    from tests.fleet.test_fleet import expected

    begun, ready = set[int](), anyio.Event()

    async def ask(number: int) -> None:
        client = AsyncClient(f"http://{HEAD}:{PORT}", reconnect=Backoff(first=0.2, longest=1.0, give_up=60))
        async with client, client.stream(f"{number}", temperature=0, max_tokens=TOKENS) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.seq > 20:
                    begun.add(number)
                    if len(begun) == ANSWERS:
                        ready.set()
            result = await stream.result()
        assert result.text == expected(f"{number}", TOKENS)
        continued.append(result.continued)

    continued: list[int] = []
    with anyio.fail_after(120):
        async with AsyncClient(f"http://{OTHER}:{PORT}") as client:
            assert (await client.generate("x", temperature=0, max_tokens=5)).text == expected("x", 5)
        async with anyio.create_task_group() as tasks:
            for number in range(ANSWERS):
                tasks.start_soon(ask, number)
            await ready.wait()
            os.killpg(kill, signal.SIGKILL)
    assert 0 < sum(map(bool, continued)) < ANSWERS, continued


def main() -> None:
    from streamengine.fleet import prefer_haproxy

    prefer_haproxy(2.0)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_ADDRESS"] = f"{HEAD}:6379"
    with ExitStack() as stack:
        # Ray notes there which cluster was started last, for whoever starts next.
        folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        os.environ["RAY_TMPDIR"] = stack.enter_context(folder)
        holder = subprocess.Popen(["unshare", "-n", "sleep", "300"])
        stack.callback(holder.kill)
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        link(holder.pid)
        start_node(stack, HEAD, "--head", "--port=6379", "--include-dashboard=false", inside=[])
        apart = ["nsenter", "-t", str(holder.pid), "-n", "unshare", "-p", "-f", "--kill-child", "--mount-proc"]
        other = start_node(stack, OTHER, f"--address={HEAD}:6379", inside=apart)

        import ray
        from ray import serve

        from streamengine import serve_ray
        from streamengine.errors import UnsupportedFeature

        for _ in range(60):
            try:
                ray.init(log_to_driver=False)
                break
            except ConnectionError:
                anyio.run(anyio.sleep, 1)
        while len([node for node in ray.nodes() if node["Alive"]]) < 2:
            anyio.run(anyio.sleep, 0.5)
        given = {"replicas": 2, "port": PORT, "host": "0.0.0.0", "engine": "tests.fleet.engines:open_engine"}
        with pytest.raises(UnsupportedFeature, match="this cluster has 2"):
            serve_ray.app({**given, "prefill": 1})
        options = {"host": "0.0.0.0", "port": PORT, "request_timeout_s": None}
        serve.start(proxy_location="EveryNode", http_options=options)
        serve.run(serve_ray.app(given), name=serve_ray.NAME, route_prefix="/")
        anyio.run(use, other.pid)
        sys.stdout.write("done\n")
        ray.shutdown()


if __name__ == "__main__":
    main()
