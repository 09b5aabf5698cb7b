"""Host and Origin where the server does not listen on loopback, and behind a proxy; the rest is in test_server."""

import pytest

from streamengine.config import ServerConfig, is_loopback
from streamengine.server.access import host_allowed, origin_allowed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost", "::1"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_what_others_can_reach_is_no_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_off_loopback_any_name_is_answered_until_names_are_configured() -> None:
    assert host_allowed("any.example:8000", ServerConfig(host="0.0.0.0"))
    named = ServerConfig(host="0.0.0.0", allow_hosts=("My.Name",))
    assert host_allowed("my.name:8000", named)
    assert not host_allowed("any.example:8000", named)
    assert not host_allowed("localhost:8000", named)


def test_a_request_without_a_host_is_refused_on_loopback() -> None:
    assert not host_allowed(None, ServerConfig())


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("https://chat.example", "chat.example", True),
        ("https://chat.example:443", "chat.example", True),
        ("https://chat.example", "chat.example:443", True),
        ("https://chat.example", "chat.example:80", False),
        ("http://chat.example", "chat.example:8000", False),
        ("https://[::1]:8000", "[::1]:8000", True),
        ("https://chat.example.evil", "chat.example", False),
        ("https://chat.example@evil", "chat.example", False),
        ("https://chat.example:x", "chat.example", False),
        ("chrome-extension://abc", "abc", False),
    ],
)
def test_an_origin_is_our_own_when_host_and_port_are(origin: str, host: str, allowed: bool) -> None:
    assert origin_allowed(origin, host, ServerConfig()) is allowed
