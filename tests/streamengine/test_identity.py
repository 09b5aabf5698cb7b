"""Keys from a file and from the environment, and tickets."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from streamengine.config import ServerConfig
from streamengine.errors import RateLimited, StartupError, Unauthorized
from streamengine.server.identity import ANONYMOUS, MAX_TICKETS, Keys, Principal, Tickets

FILE = """
[alice]
key = "sk-alice-1"
tenant = "research"

[bob]
sha256 = "{hash}"
admin = true
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE.format(hash=sha256(b"sk-bob-0001").hexdigest()))
    return path


def keys_of(path: Path, environment: str = "") -> Keys:
    return Keys(ServerConfig(api_key_file=str(path)), environment)


def test_a_key_stands_for_its_principal(path: Path) -> None:
    keys = keys_of(path, "carol:sk-carol-1, sk-nameless-1")
    assert keys.find("sk-alice-1") == Principal(name="alice", tenant="research")
    assert keys.find("sk-bob-0001") == Principal(name="bob", tenant="bob", admin=True)
    assert keys.find("sk-carol-1") == Principal(name="carol", tenant="carol")
    assert keys.find("sk-nameless-1").name == "key2"
    for wrong in ("", "sk-alice-", "sk-alice-11", sha256(b"sk-bob-0001").hexdigest(), "\udc80"):
        with pytest.raises(Unauthorized):
            keys.find(wrong)


def test_every_key_is_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: compared.append((one, other)) or one == other)
    keys_of(path, "sk-carol-1").find("sk-alice-1")
    assert len(compared) == 3
    assert {len(digest) for pair in compared for digest in pair} == {32}


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"authorization": "Bearer sk-alice-1"}, "alice"),
        ({"authorization": "bearer  sk-alice-1 "}, "alice"),
        ({"authorization": "Bearer wrong"}, None),
        ({"authorization": "Bearer "}, None),
        ({"authorization": "Basic sk-alice-1"}, None),
        ({"authorization": "sk-alice-1"}, None),
        ({}, None),
    ],
)
def test_only_a_bearer_of_a_known_key_is_somebody(path: Path, headers: dict[str, str], name: str | None) -> None:
    keys = keys_of(path)
    if name is None:
        with pytest.raises(Unauthorized):
            keys.authenticate(headers)
    else:
        assert keys.authenticate(headers).name == name


def test_without_keys_everybody_is_anybody() -> None:
    keys = Keys(ServerConfig())
    assert not keys.needed
    assert keys.authenticate({"authorization": "Bearer whatever"}) is ANONYMOUS


def test_the_file_is_read_again_when_it_has_changed_and_kept_when_it_is_broken(path: Path) -> None:
    keys = keys_of(path)
    path.write_text('[dave]\nkey = "sk-dave-1"\n')
    os.utime(path, ns=(1, 1))
    assert keys.find("sk-dave-1").name == "dave"
    with pytest.raises(Unauthorized):
        keys.find("sk-alice-1")
    path.write_text("[dave\n")
    assert keys.find("sk-dave-1").name == "dave"
    path.unlink()
    assert keys.find("sk-dave-1").name == "dave"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("[alice", "is no TOML"),
        ("[alice]\n", "needs either key or sha256"),
        ('[alice]\nkey = "sk-alice-1"\nsha256 = "' + "0" * 64 + '"\n', "needs either key or sha256"),
        ('[alice]\nkey = "short"\n', "key"),
        ('[alice]\nkey = "sk-alice-1"\nadmn = true\n', "admn"),
        ('alice = "sk-alice-1"\n', "Expected `object`"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_and_not_quoted(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match=why) as refused:
        keys_of(path)
    assert "sk-alice-1" not in refused.value.message
    assert refused.value.param == "api_key_file"


def test_a_file_that_is_not_there_and_a_key_that_is_too_short_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"nothing\.toml"):
        keys_of(tmp_path / "nothing.toml")
    with pytest.raises(StartupError, match="key 2 is shorter"):
        Keys(ServerConfig(), "long-enough-1,alice:short")


def test_a_ticket_is_good_once_and_for_a_minute() -> None:
    tickets, alice = Tickets(), Principal(name="alice")
    first, second = tickets.issue(alice, 0.0), tickets.issue(alice, 0.0)
    assert tickets.redeem(first, 59.0) == alice
    for ticket, now in ((first, 59.0), (second, 60.0), (second, 1.0), ("", 1.0)):
        with pytest.raises(Unauthorized):
            tickets.redeem(ticket, now)


def test_unused_tickets_are_bounded_for_each_principal() -> None:
    tickets, alice = Tickets(), Principal(name="alice")
    for _ in range(MAX_TICKETS):
        tickets.issue(alice, 0.0)
    with pytest.raises(RateLimited):
        tickets.issue(alice, 59.0)
    tickets.issue(Principal(name="bob"), 59.0)
    tickets.issue(alice, 60.0)
