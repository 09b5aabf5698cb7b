"""Who asks: API keys from a file and from the environment, and the tickets that stand for one for a minute.

The file is TOML, a table for each key, and is read again when it has changed; one that cannot be read then leaves
the keys as they are. ::

    [alice]                  # the principal: streams and limits are its own
    key = "sk-…"             # or sha256 = "…", the hash of the key in hexadecimal
    tenant = "research"      # shares the engine and cached prefixes with the same; the principal's name by default
    admin = true             # may read /v1/stats and ask /v1/profile

``STREAMENGINE_API_KEYS`` holds keys with commas between them, ``name:key`` or ``key`` alone. Without any key
everybody is the anonymous principal.
"""

import hmac
import logging
import os
import secrets
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from streamengine.config import ServerConfig
from streamengine.errors import RateLimited, StartupError, Unauthorized
from streamengine.streams import ANONYMOUS, Principal

__all__ = ["ANONYMOUS", "Keys", "Principal", "Tickets"]

ENVIRONMENT = "STREAMENGINE_API_KEYS"
MAX_TICKETS = 256
"""Of one principal, unused and not yet expired."""
TICKET_S = 60.0

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[str, Meta(min_length=8, max_length=8192)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    tenant: Annotated[str, Meta(max_length=256)] | None = None
    admin: bool = False


class Keys:
    """The keys of one server.

    Raises:
        StartupError: the file cannot be read, is no such file, or holds no key.
    """

    def __init__(self, config: ServerConfig, environment: str = "") -> None:
        self._path = config.api_key_file
        self._fixed = _from_environment(environment)
        self._stamp = self._look()
        self._known = self._fixed | self._read()

    @property
    def needed(self) -> bool:
        """There are keys, so a request without one is refused."""
        return self._path is not None or bool(self._fixed)

    def find(self, token: str) -> Principal:
        """Whose key ``token`` is.

        Raises:
            Unauthorized: nobody's.
        """
        self._reload()
        given = sha256(token.encode(errors="surrogateescape")).digest()
        found = None
        for digest, principal in self._known.items():  # all of them, always: time tells nothing
            if hmac.compare_digest(digest, given):
                found = principal
        if found is None:
            raise Unauthorized("the key is not known")
        return found

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Who sent these (names in lower case). The same for HTTP and for the upgrade to a WebSocket.

        Raises:
            Unauthorized: a key is needed and ``Authorization: Bearer`` does not bring one that is known.
        """
        if not self.needed:
            return ANONYMOUS
        kind, _, token = headers.get("authorization", "").partition(" ")
        if not token:
            raise Unauthorized("a key is needed: send Authorization: Bearer")
        if kind.lower() != "bearer":
            raise Unauthorized("the only kind of authorization is Bearer")
        return self.find(token.strip())

    def _reload(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = self._fixed | self._read()
        except StartupError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            logger.info("%d keys were read again", len(self._known))

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[bytes, Principal]:
        if self._path is None:
            return {}
        try:
            with open(self._path, "rb") as file:
                entries = msgspec.convert(tomllib.load(file), dict[str, _Entry])
        except (OSError, ValueError, msgspec.ValidationError) as error:
            # A parser's message may quote a line of the file, but not msgspec's: it names places and types.
            why = "is no TOML" if isinstance(error, tomllib.TOMLDecodeError) else str(error)
            raise StartupError(f"api_key_file {self._path}: {why}", param="api_key_file") from None
        if not entries:
            raise StartupError(f"api_key_file {self._path} holds no key", param="api_key_file")
        return {_digest(name, entry, self._path): _principal(name, entry) for name, entry in entries.items()}


def _digest(name: str, entry: _Entry, path: str) -> bytes:
    if not name or (entry.key is None) == (entry.sha256 is None):
        raise StartupError(f"api_key_file {path}: {name!r} needs either key or sha256", param="api_key_file")
    return bytes.fromhex(entry.sha256) if entry.sha256 else sha256((entry.key or "").encode()).digest()


def _principal(name: str, entry: _Entry) -> Principal:
    return Principal(name=name, tenant=name if entry.tenant is None else entry.tenant, admin=entry.admin)


def _from_environment(text: str) -> dict[bytes, Principal]:
    known = {}
    for number, item in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        name, colon, key = item.rpartition(":")
        if len(key) < 8:
            raise StartupError(f"{ENVIRONMENT}: key {number} is shorter than 8 characters", param="api_keys")
        name = name if colon and name else f"key{number}"
        known[sha256(key.encode()).digest()] = Principal(name=name, tenant=name)
    return known


class Tickets:
    """What a browser may put into a URL in place of a key: good for one connection, and for a minute."""

    def __init__(self) -> None:
        self._issued: dict[bytes, tuple[Principal, float]] = {}

    def issue(self, principal: Principal, now: float) -> str:
        """Raises `RateLimited` where the principal has `MAX_TICKETS` unused ones."""
        self._issued = {key: issued for key, issued in self._issued.items() if issued[1] > now}
        if sum(owner == principal for owner, _ in self._issued.values()) >= MAX_TICKETS:
            raise RateLimited(f"{MAX_TICKETS} tickets are unused, which is the most")
        ticket = secrets.token_urlsafe(24)
        self._issued[sha256(ticket.encode()).digest()] = principal, now + TICKET_S
        return ticket

    def redeem(self, ticket: str, now: float) -> Principal:
        """Who it was issued to, once.

        Raises:
            Unauthorized: it is none, was used or has expired.
        """
        # By its hash, so that what a look-up takes tells nothing about a ticket that is good.
        principal, until = self._issued.pop(sha256(ticket.encode(errors="replace")).digest(), (None, 0.0))
        if principal is None or until <= now:
            raise Unauthorized("the ticket is not known, was used, or has expired")
        return principal
