"""An engine's worker and nothing else, in a process that a test may kill, stop or cut off.

``python -m tests.transfer_peer TRANSPORT ADDRESS SEED INCARNATION PAGES PAGE_BYTES``: says where it listens, and ends
with its standard input.
"""

import sys
from contextlib import ExitStack

from streamengine.transfer.nixl import Nixl
from streamengine.transfer.shared_memory import SharedMemory
from streamengine.transfer.transport import Transport
from tests.transfers import core, memories, no_nixl


def make_transport(name: str) -> Transport:
    if name == "shared_memory":
        return SharedMemory()
    no_nixl()
    return Nixl()


def main() -> None:
    name, address, seed, incarnation, pages, page_bytes = sys.argv[1:]
    with ExitStack() as stack:
        (memory,) = stack.enter_context(memories(int(pages), int(page_bytes), seeds=(int(seed),)))
        transport = make_transport(name)
        p = stack.enter_context(core(transport, memory, incarnation, incarnation=incarnation, listen_at=address))
        sys.stdout.write(f"{p.worker.address}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
