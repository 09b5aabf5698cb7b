"""Entry of the core's process: ``python -m streamengine.child FD``, where FD is its end of the link.

Everything else comes over the link. When the front is gone there is nobody left to answer, so the
process ends at once, even in the middle of a compile.
"""

import logging
import os
import select
import socket
import sys
import threading

from streamengine.compose import build_runner
from streamengine.core import BuildRunner, run_core
from streamengine.link import CoreLink


def main(build: BuildRunner = build_runner) -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars would mix with ours; progress goes over the link
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells stderr when it starts and stops
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what is wrong with a checkpoint is said in one line
    logging.basicConfig(level=logging.INFO, format="core: %(message)s", stream=sys.stderr)
    logging.getLogger("compiled").setLevel(logging.INFO)
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_with_the_front, args=(sock.fileno(),), daemon=True).start()
    link = CoreLink(sock)
    try:
        run_core(link, build)
    finally:
        link.close()


def _exit_with_the_front(descriptor: int) -> None:
    poll = select.poll()
    # Asking for no event leaves the ones that are always told: the other end hung up, or this one is closed.
    poll.register(descriptor, 0)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
