"""The routes of the application, and their description."""

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from pagewire.gateway.http import openapi

Handler = Callable[..., Awaitable[Response]]

DOCS_PATH = "/docs"
# Swagger UI as a Python package: a page that works without the internet.
_ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
# A browser that opens the page has no API key to send. These answers are the same for all clients.
DESCRIPTION_PATHS = frozenset(
    {openapi.PATH, DOCS_PATH, *(f"{DOCS_PATH}/{name}" for name in _ASSETS)}
)


class Routes:
    """Adds routes to an application. All of them are in its description."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._bodies: list[type[BaseModel]] = []

    def get(self, path: str, handler: Handler, name: str) -> None:
        """A route for GET, and after `allow_head` for HEAD."""
        self._add(path, handler, name, "GET")

    def post(
        self,
        path: str,
        handler: Handler,
        name: str,
        body: type[BaseModel] | None = None,
        streams: bool = False,
    ) -> None:
        """A route for POST; `body` is the model that checks its body, which the handler reads."""
        if body is not None:
            self._bodies.append(body)
        self._add(path, handler, name, "POST", body, streams)

    def get_unlisted(self, path: str, answer: Callable[[Request], Any]) -> None:
        """A route for GET and HEAD that is not part of the API: the description leaves it out."""
        self._app.add_route(path, answer, methods=["GET"], include_in_schema=False)

    def post_unlisted(self, path: str, answer: Callable[[Request], Any]) -> None:
        """The same for POST."""
        self._app.add_route(path, answer, methods=["POST"], include_in_schema=False)

    def describe(self) -> None:
        """Adds the description of the routes so far, and a page that shows it."""
        document = get_openapi(
            title="Pagewire", version=version("pagewire"), routes=self._app.routes
        )
        description = JSONResponse(openapi.complete(document, self._bodies))
        page = get_swagger_ui_html(
            openapi_url=openapi.PATH.removeprefix("/"),
            title="Pagewire",
            swagger_js_url=f"{DOCS_PATH.removeprefix('/')}/{_ASSETS[0]}",
            swagger_css_url=f"{DOCS_PATH.removeprefix('/')}/{_ASSETS[1]}",
            swagger_favicon_url=f"{DOCS_PATH.removeprefix('/')}/{_ASSETS[2]}",
        )
        self.get_unlisted(openapi.PATH, partial(_answer_with, description))
        self.get_unlisted(DOCS_PATH, partial(_answer_with, page))
        for name in _ASSETS:
            file = FileResponse(Path(str(files("fastapi_offline"))) / "static" / name)
            self.get_unlisted(f"{DOCS_PATH}/{name}", partial(_answer_with, file))

    def allow_head(self) -> None:
        """Allows HEAD on every route for GET. A description made later would list both."""
        for route in self._app.routes:
            if isinstance(route, APIRoute) and route.methods is not None:
                route.methods |= {"HEAD"} if "GET" in route.methods else set()

    def _add(
        self,
        path: str,
        handler: Handler,
        name: str,
        method: str,
        body: type[BaseModel] | None = None,
        streams: bool = False,
    ) -> None:
        self._app.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            operation_id=name,
            responses=openapi.responses(body is not None, streams),
            openapi_extra=None if body is None else openapi.request_body(body),
        )


def _answer_with(response: Response, request: Request) -> Response:
    return response
