"""Who may talk to this server: the Host and Origin checks. Pure functions of header values.

A browser lets any page open a WebSocket to any address, this machine's loopback included, and CORS does
not apply to it: only these checks keep a foreign page from using the engine. The Host check stops a name
that was rebound to 127.0.0.1, whose Origin and Host would otherwise agree.
"""

from urllib.parse import urlsplit

from streamengine.config import ServerConfig, is_loopback

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORTS = {"http": 80, "https": 443}


def host_allowed(host: str | None, config: ServerConfig) -> bool:
    """``host`` is the request's Host header. Checked on loopback, and anywhere once names are configured."""
    if not is_loopback(config.host) and not config.allow_hosts:
        return True
    name = _name(host or "")
    return name in {config.host, *(allowed.lower() for allowed in config.allow_hosts)} or (
        is_loopback(config.host) and name in LOOPBACK_NAMES
    )


def origin_allowed(origin: str | None, host: str | None, config: ServerConfig) -> bool:
    """No Origin is not a browser; our own page and the configured origins may; ``null`` and the rest may not."""
    if origin is None or origin.lower() in {allowed.lower().rstrip("/") for allowed in config.allow_origins}:
        return True
    try:
        split = urlsplit(origin)
        port = DEFAULT_PORTS.get(split.scheme)
        return port is not None and _address(split.netloc, port) == _address(host or "", port)
    except ValueError:
        return False


def _address(netloc: str, default_port: int) -> tuple[str | None, int]:
    split = urlsplit(f"//{netloc}")
    return split.hostname, split.port or default_port


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
