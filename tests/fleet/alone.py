"""A fleet as `streamengine ray` starts it, behind Ray's own proxy: answers over a WebSocket and over HTTP, then ends
as a terminal would end it. Run in a network namespace of its own."""

import json
import os
import signal
import sys
import threading
import urllib.request

os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"

from streamengine import serve_ray
from streamengine.config import EngineConfig, ServerConfig
from streamengine.scaling import Fleet
from streamengine_sdk import Client

PORT = 8124


def use(url: str) -> None:
    with Client(url) as client:
        result = client.generate("hello", temperature=0, max_tokens=12)
    body = json.dumps({"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 12}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        text = json.loads(answer.read())["choices"][0]["text"]
    sys.stdout.write(f"{result.text} {text}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    fleet = Fleet(replicas=1, cpus=0.1, engine="tests.fleet.engines:open_engine")
    server = ServerConfig(port=PORT, drain_s=1)

    def ready(url: str) -> None:
        threading.Timer(1.0, use, (url,)).start()

    serve_ray.run(fleet, EngineConfig(), server, ready=ready)


if __name__ == "__main__":
    main()
