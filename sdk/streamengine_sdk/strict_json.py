"""Questions about JSON text that parsers do not ask: is a key there twice, how deep is it, and how branched?

Two parsers may read a duplicate key differently, and depth is stack in every parser after this one.
"""

import json
from typing import Any

MAX_DEPTH = 64
"""Arrays and objects inside each other, at most."""

MAX_CONTAINERS = 100_000
"""Arrays and objects in all, at most: each costs a parser a hundred times its two characters."""

_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def check_size(text: str) -> None:
    """Raises `ValueError` for more than `MAX_CONTAINERS`. To be asked before anything parses ``text``."""
    if text.count("{") + text.count("[") > MAX_CONTAINERS and len(_brackets(text)) > 2 * MAX_CONTAINERS:
        raise ValueError(f"more than {MAX_CONTAINERS} arrays and objects")


def check_json(text: str) -> None:
    """Raises `ValueError` if ``text``, which is valid JSON, is ambiguous or nested deeper than `MAX_DEPTH`."""
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(_brackets(text))
    _UNIQUE.decode(text)


def _brackets(text: str) -> bytes:
    """Those outside of strings, all of one kind: some milliseconds a megabyte, whatever is in it."""
    # What is between every second pair of quotes is a string, once escaped quotes are gone.
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    return outside.encode(errors="replace").translate(_ONE_KIND, _ALL_BUT_BRACKETS)


def _check_depth(brackets: bytes) -> None:
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # one level less
    if brackets:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"key {key[:64]!r} is there twice")
        seen.add(key)


_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique)
