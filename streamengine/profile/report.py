"""A profile as one HTML file that needs nothing else: no server, no network, no other file."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamengine.profile.record import Profile, read

_HERE = Path(__file__).resolve().parent


def render(profile: Profile) -> str:
    """The report. Its policy runs the two texts of this package and nothing else, whatever the profile holds."""
    style, script = _text("css"), _text("js")
    # Inside of a script element, "<" is all that could end it or open a comment.
    data = msgspec.json.encode(profile).decode().replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    parts = {"{policy}": policy, "{style}": style, "{script}": script, "{data}": data}
    return re.sub(r"\{(policy|style|script|data)\}", lambda found: parts[found[0]], _text("html"))


def command(
    path: Annotated[Path, typer.Argument(metavar="PROFILE.json", help="What `POST /v1/profile` answered, for one.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write.")] = None,
) -> None:
    """Write the report of a profile that is there; prints its path."""
    out = out or path.with_suffix(".html")
    out.write_text(render(read(path)), encoding="utf-8")
    typer.echo(out)


def _text(kind: str) -> str:
    return (_HERE / f"report.{kind}").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
