"""A profile as one HTML file that needs nothing else: no server, no network, no other file."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import msgspec

from streamengine.profile.record import Profile

_HERE = Path(__file__).resolve().parent


def render(profile: Profile) -> str:
    """The report. Its policy runs the two texts of this package and nothing else, whatever the profile holds."""
    style, script = _text("css"), _text("js")
    # Inside of a script element, "<" is all that could end it or open a comment.
    data = msgspec.json.encode(profile).decode().replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    parts = {"{policy}": policy, "{style}": style, "{script}": script, "{data}": data}
    return re.sub(r"\{(policy|style|script|data)\}", lambda found: parts[found[0]], _text("html"))


def _text(kind: str) -> str:
    return (_HERE / f"report.{kind}").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
