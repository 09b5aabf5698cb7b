"""Two questions about JSON text that parsers do not ask: is a key there twice, and how deep is it?

Two parsers may read a duplicate key differently, and depth is stack in every parser after this one.
"""

import json
import re
from typing import Any

MAX_DEPTH = 64
"""Arrays and objects inside each other, at most."""

# Strings are matched whole, so that brackets inside of them do not count.
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def check_json(text: str) -> None:
    """Raises `ValueError` if ``text``, which is valid JSON, is ambiguous or nested deeper than `MAX_DEPTH`."""
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(text)
    _UNIQUE.decode(text)


def _check_depth(text: str) -> None:
    depth = 0
    for token in _BRACKETS.findall(text):
        depth += (token in "[{") - (token in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _unique(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice[:64]!r} is there twice")


_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique)
