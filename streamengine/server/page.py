"""The built-in page and the browser client, served from memory under a strict content security policy."""

import gzip
from hashlib import blake2b
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HTML, SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
FILES = {
    "/": ("page/index.html", HTML),
    "/client.js": ("client.js", SCRIPT),
    "/page.js": ("page/page.js", SCRIPT),
    "/chat.js": ("page/chat.js", SCRIPT),
    "/answer.js": ("page/answer.js", SCRIPT),
    "/tokens.js": ("page/tokens.js", SCRIPT),
    "/chart.js": ("page/chart.js", SCRIPT),
    "/panels.js": ("page/panels.js", SCRIPT),
    "/store.js": ("page/store.js", SCRIPT),
    "/style.css": ("page/style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("page/icon.svg", "image/svg+xml"),
}
"""What there is, by path: nothing else of the folder can be asked for."""

HEADERS = {
    # The last three do not follow from default-src.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Kept, but asked about each time: modules of two versions must never meet.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


def page_routes() -> list[Route]:
    folder = _folder()
    return [_route(path, (folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()]


def _route(path: str, body: bytes, media_type: str) -> Route:
    headers = {**HEADERS, "etag": f'"{blake2b(body, digest_size=12).hexdigest()}"'}
    packed = gzip.compress(body, mtime=0)

    async def answer(request: Request) -> Response:
        asked = Headers(scope=request.scope)
        if headers["etag"] in asked.get("if-none-match", "").replace("W/", "").split(", "):
            return Response(status_code=304, headers=headers)
        if "gzip" in asked.get("accept-encoding", ""):
            return Response(packed, media_type=media_type, headers={**headers, "content-encoding": "gzip"})
        return Response(body, media_type=media_type, headers=headers)

    return Route(path, answer)


def _folder() -> Path:
    """A wheel carries the files beside this module; a checkout and an editable install have them in ``sdk/``."""
    here = Path(__file__).resolve().parent
    installed = here / "browser"
    return installed if installed.is_dir() else here.parents[1] / "sdk" / "browser"
