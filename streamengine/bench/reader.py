"""Reads many streams at once as cheaply as Python can.

``python -m streamengine.bench.reader PORT STREAMS TOKENS COALESCE_MS``. A connection for each stream. Says
``connected``, waits for a line, then asks for everything; at the end it prints as JSON the last message of every
stream and the seconds that reading took, of time and of CPU.
"""

import json
import selectors
import socket
import sys
import time

PATIENCE_S = 30.0
END = b'{"type":"done"'
HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def main() -> None:
    port, streams, tokens, coalesce_ms = map(int, sys.argv[1:])
    sockets = [_connected(port) for _ in range(streams)]
    print("connected", flush=True)  # noqa: T201 - the parent reads it
    sys.stdin.readline()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    delivery = {"coalesce_ms": coalesce_ms}
    request = {"type": "generate", "id": "r", "token_ids": [0], "max_tokens": tokens, "delivery": delivery}
    ends = _read(sockets, _frame(json.dumps(request).encode()))
    took = {"seconds": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu_begun}
    json.dump({**took, "ends": ends}, sys.stdout)


def _connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    sock.sendall(HANDSHAKE)
    received = b""
    while b'"hello"' not in received:
        data = sock.recv(65536)
        assert data, f"closed after {received!r}"
        received += data
    sock.setblocking(False)
    return sock


def _frame(text: bytes) -> bytes:
    """Masked with zeros, which is a mask like any other."""
    assert len(text) < 126, "a short message"
    return bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text


def _read(sockets: list[socket.socket], request: bytes) -> list[object]:
    ends: list[object] = []
    poll, tails = selectors.DefaultSelector(), dict.fromkeys(sockets, b"")
    for sock in sockets:
        poll.register(sock, selectors.EVENT_READ, sock)
        sock.send(request)
    while len(ends) < len(sockets):
        ready = poll.select(PATIENCE_S)
        assert ready, f"nothing came for {PATIENCE_S} s"
        for key, _ in ready:
            sock = key.data
            data = sock.recv(65536)
            assert data and b'{"type":"error"' not in data, f"no end: {data!r}"
            tails[sock] = tail = (tails[sock] + data)[-4096:]
            if END in tail and tail.endswith(b"}"):
                ends.append(json.loads(tail[tail.rindex(END) :]))
                poll.unregister(sock)
    return ends


if __name__ == "__main__":
    main()
