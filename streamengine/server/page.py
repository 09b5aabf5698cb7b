"""The built-in page and the browser client, served from memory under a strict content security policy."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/client.js": ("client.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

HEADERS = {
    # The last three do not follow from default-src.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    folder = _folder()
    return [_route(path, (folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()]


def _route(path: str, body: bytes, media_type: str) -> Route:
    async def answer(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return Route(path, answer)


def _folder() -> Path:
    """A wheel carries the files beside this module; a checkout and an editable install have them in ``sdk/``."""
    here = Path(__file__).resolve().parent
    installed = here / "browser"
    return installed if installed.is_dir() else here.parents[1] / "sdk" / "browser"
