"""Two hosts on one machine: a network namespace each and a cable between them.

``unshare -n -m python -m tests.transfer_hosts CASE``: this process is the decode engine's host; the prefill engine runs
in another namespace, and only TCP reaches it. Says ``ok`` at the end.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from compiled.step import KVMemory
from streamengine.transfer.values import Connected, Failed, Forget, Landed, Lost, Read
from tests.transfer_peer import make_transport
from tests.transfers import POISON, Core, core, memories, page, scattered

PAGES, PAGE_BYTES = 64, 2**20
SEE = "mount -t sysfs sysfs /sys"
"""UCX looks there for network devices; otherwise it shows those of the namespace that mounted it."""

ADDRESS = "10.77.0.2:7701"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


def cable(state: str) -> None:
    ip("link", "set", "d0", state)


def no_namespaces() -> str | None:
    """Why there can be no hosts here."""
    try:
        made = subprocess.run(
            ["unshare", "-n", "-m", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else None


@contextmanager
def other_host(command: str) -> Iterator[subprocess.Popen[str]]:
    """It runs ``command``, which says a line, once a line was written to it: before, there is no cable yet."""
    script = f"{SEE}; read line; export UCX_NET_DEVICES=p0; {command}"
    process = subprocess.Popen(
        ["unshare", "-n", "-m", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def connect_hosts(process: subprocess.Popen[str]) -> None:
    subprocess.run(SEE.split(), check=True, timeout=10)
    while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    ip("link", "set", "lo", "up")
    ip("link", "add", "d0", "type", "veth", "peer", "name", "p0", "netns", str(process.pid))
    ip("addr", "add", "10.77.0.1/24", "dev", "d0")
    ip("link", "set", "d0", "up")
    there = ["nsenter", "-t", str(process.pid), "-n", "ip"]
    for words in ("link set lo up", "addr add 10.77.0.2/24 dev p0", "link set p0 up"):
        subprocess.run([*there, *words.split()], check=True, timeout=10)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline(), "the other engine did not start"


def right(ours: KVMemory, theirs: KVMemory, pairs: tuple[tuple[int, int], ...]) -> bool:
    return all(page(ours, target) == page(theirs, source) for source, target in pairs)


def whole(d: Core, ours: KVMemory, theirs: KVMemory) -> None:
    """Pages cross the cable and are right."""
    pairs = scattered(60, seed=1)
    d.post(Read("t", ADDRESS, "P-1", pairs))
    d.until(Landed, 60)
    assert right(ours, theirs, pairs)


def cut(d: Core, ours: KVMemory, theirs: KVMemory) -> None:
    """While a read is on its way the cable is pulled. The control connection tells it within its time; the read keeps
    its pages until it ends, and after that nothing comes any more, when the cable is back."""
    whole(d, ours, theirs)
    pairs = scattered(60, seed=2)
    cable("down")
    d.post(Read("cut", ADDRESS, "P-1", pairs))
    began = time.monotonic()
    d.until(Lost, 40)
    assert time.monotonic() - began < 30
    d.post(Forget(ADDRESS))
    cable("up")
    seen = [d.until(lambda report: isinstance(report, Landed | Failed | Connected), 120) for _ in range(2)]
    assert sum(isinstance(report, Connected) for report in seen) == 1
    assert right(ours, theirs, pairs) or any(isinstance(report, Failed) for report in seen)
    for _, target in pairs:  # given away
        ours.view[target * PAGE_BYTES :][:PAGE_BYTES] = bytes([POISON]) * PAGE_BYTES
    time.sleep(2)
    assert all(page(ours, target) == bytes([POISON]) * PAGE_BYTES for _, target in pairs), "a late writer"
    whole(d, ours, theirs)


def main() -> None:
    case = {"whole": whole, "cut": cut}[sys.argv[1]]
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "d0"}
    with ExitStack() as stack:
        what = ("nixl", "0.0.0.0:7701", "1", "P-1", str(PAGES), str(PAGE_BYTES))
        command = f"exec {sys.executable} -m tests.transfer_peer {' '.join(what)}"
        connect_hosts(stack.enter_context(other_host(command)))
        theirs, ours = stack.enter_context(memories(PAGES, PAGE_BYTES))
        d = stack.enter_context(core(make_transport("nixl"), ours, "D", peers=[ADDRESS]))
        d.connected()
        case(d, ours, theirs)
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
