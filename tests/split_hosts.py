"""Two `serve` commands on two hosts, see `tests.transfer_hosts`.

``unshare -n -m python -m tests.split_hosts EXPECTED``: EXPECTED has the answers of one engine alone.
Says ``ok`` at the end.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.test_split import LENGTHS, ask_all, eventually, serving
from tests.transfer_hosts import ADDRESS, connect_hosts, other_host


def main() -> None:
    expected = json.loads(Path(sys.argv[1]).read_text())
    with ExitStack() as stack:
        host = stack.enter_context(other_host("echo here; exec sleep 900"))
        connect_hosts(host)
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "p0", "STREAMENGINE_PEER_KEY": "of both hosts"}
        there = ("nsenter", "-t", str(host.pid), "-n", "-m")
        of_p = ("--role", "prefill", "--listen", ADDRESS, "--kv-transport", "nixl")
        stack.enter_context(serving(*of_p, prefix=there))
        os.environ["UCX_NET_DEVICES"] = "d0"
        of_d = ("--role", "decode", "--peer", ADDRESS, "--kv-transport", "nixl", "--prefill-threshold", "1")
        d = stack.enter_context(serving(*of_d))
        eventually(d, remote_peers=1)
        found = ask_all(d.url)
        assert json.loads(json.dumps([answer for answer, _ in found])) == expected
        ways = [way for _, way in found]
        assert ways.count("done") >= len(LENGTHS) - 1, f"{ways}"
        eventually(d, transfer_pages=0, remote_zombies=0)
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
