"""Which web pages of other origins may call the gateway: none by default."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pagewire.gateway import request_ids
from pagewire.gateway.parsing.unknown_fields import IGNORED_HEADER

# The allowed headers in the answer to a preflight request that names no header.
_ALLOWED = ["authorization", "content-type", request_ids.HEADER, "x-api-key"]
_EXPOSED = [
    "retry-after",
    IGNORED_HEADER,
    request_ids.HEADER,
    "request-id",  # the name that Anthropic's clients read
    *(
        f"x-ratelimit-{name}-{kind}"
        for kind in ("requests", "tokens")
        for name in ("limit", "remaining", "reset")
    ),
]


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, callable by pages of these origins; `*` allows any. Cookies are never allowed."""
    if not origins:
        return app
    middleware = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=_ALLOWED,
        expose_headers=_EXPOSED,
        max_age=600,
    )
    # Clients send headers of their own, such as OpenAI's `x-stainless-os`.
    middleware.allow_all_headers = True
    return middleware
