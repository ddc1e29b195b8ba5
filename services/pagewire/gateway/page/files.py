"""The files of the page: read once, and served as they are. There is no build step."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

PATH = "/"
FOLDER = "/page"
MAX_BYTES = 150 << 10  # of all files together

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The page runs its own scripts only, and talks to its own server only. It cannot be framed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Browsers ask again each time: a new version of the gateway may have other files.
    "cache-control": "no-cache",
}


class PageFile:
    """One file, with a tag that shows a browser whether its copy is current."""

    def __init__(self, name: str, content: bytes) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        self._content = content
        self._headers = {
            **_HEADERS,
            "etag": tag,
            "content-type": _TYPES[name.rpartition(".")[2]],
        }

    async def answer(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def page_files() -> Mapping[str, PageFile]:
    """The files of the page by path."""
    folder = files("pagewire.gateway.page") / "assets"
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    served = {f"{FOLDER}/{name}": PageFile(name, data) for name, data in contents.items()}
    return {**served, PATH: PageFile("index.html", contents["index.html"])}
