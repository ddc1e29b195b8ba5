"""The gateway's ASGI application and its routes."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError
from pagewire.gateway.api import chat, completions
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.openapi import PATH, document
from pagewire.gateway.api.parsing import Route
from pagewire.gateway.api.unknown_fields import IGNORED_HEADER
from pagewire.gateway.auth.access import AccessControl
from pagewire.gateway.errors import CLIENT_GONE_STATUS, RETRY_AFTER, ApiError, ClientGoneError
from pagewire.gateway.http.answer import answer
from pagewire.gateway.http.body import read_body
from pagewire.gateway.http.cross_origin import allow_origins
from pagewire.gateway.http.parser_pool import ParserPool
from pagewire.gateway.http.traffic import Traffic
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.models import ServedModel
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

# The paths of requests that generate. They are limited, charged and timed.
GENERATING = (chat.PATH, completions.PATH)


@dataclass(slots=True)
class Gateway:
    """The state of one gateway process. While `draining` it refuses new requests."""

    schedulers: Schedulers
    metrics: GatewayMetrics
    max_body_bytes: int
    max_open_requests: int
    access: AccessControl = field(default_factory=AccessControl)
    cors_origins: tuple[str, ...] = ()
    describe: bool = False
    max_open_body_bytes: int = GatewayConfig.max_open_body_bytes
    limits: BodyLimits = field(default_factory=BodyLimits)
    parser_processes: int = GatewayConfig.parser_processes
    parse_timeout: float = GatewayConfig.parse_timeout
    strict_fields: bool = GatewayConfig.strict_fields
    traffic: Traffic = field(init=False)
    parser: ParserPool = field(init=False)
    draining: bool = False

    def __post_init__(self) -> None:
        self.traffic = Traffic(
            self.metrics,
            GENERATING,
            self.max_open_requests,
            max(self.max_open_body_bytes, self.max_body_bytes),
            lambda: self.schedulers.retry_after,
        )
        self.parser = ParserPool(
            self.limits,
            self.max_body_bytes,
            self.parser_processes,
            self.parse_timeout,
            self.strict_fields,
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, "chat")

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, "completions")

    async def models(self) -> JSONResponse:
        """GET /v1/models."""
        served = self.schedulers.models()
        data = [_model(served[name]) for name in sorted(served)]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, model: str) -> JSONResponse:
        """GET /v1/models/{model}."""
        return JSONResponse(_model(self.schedulers.model(model)))

    async def healthz(self) -> JSONResponse:
        """GET /healthz: the process is running."""
        return JSONResponse({"status": "ok"})

    async def readyz(self) -> JSONResponse:
        """GET /readyz: requests are accepted, and some scheduler can run them."""
        if self.draining:
            return JSONResponse({"status": "draining"}, 503, headers=RETRY_AFTER)
        if not self.schedulers.ready:
            return JSONResponse({"status": "no ready scheduler"}, 503, headers=RETRY_AFTER)
        return JSONResponse({"status": "ready"})

    async def _generate(self, request: Request, route: Route) -> Response:
        if self.draining:
            refusal = ApiError.of(RequestError(Code.UNAVAILABLE, "the gateway is shutting down"))
            refusal.headers = {**RETRY_AFTER, "connection": "close"}
            raise refusal
        body = await read_body(request, self.max_body_bytes)
        arrived = time.perf_counter()
        models = {name: ServedModel.of(model) for name, model in self.schedulers.models().items()}
        job = await self.parser.parse(route, body, models, request.receive)
        del body
        model = job.formatter.envelope.model
        charge = self.access.charge(request.scope, job, models[model].max_model_len)
        response = await answer(job, self.schedulers, request.receive, charge, arrived)
        if job.ignored:
            response.headers[IGNORED_HEADER] = ", ".join(job.ignored)
        return response


def create_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application; every error has OpenAI's body."""
    app = FastAPI(title="Pagewire", openapi_url=None, redirect_slashes=False)
    app.add_api_route(chat.PATH, gateway.chat, methods=["POST"], response_model=None)
    app.add_api_route(completions.PATH, gateway.completions, methods=["POST"], response_model=None)
    for path, endpoint in (
        ("/v1/models", gateway.models),
        ("/v1/models/{model:path}", gateway.model),
        ("/healthz", gateway.healthz),
        ("/readyz", gateway.readyz),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    if gateway.describe:
        description = JSONResponse(document())
        app.add_route(PATH, lambda _: description, methods=["GET"])
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    with_access = gateway.access.wrap(app, GENERATING)
    # The outermost layer: a page can read a refusal only if it has these headers too.
    return allow_origins(gateway.traffic.wrap(with_access), gateway.cors_origins)


def _model(model: pb.Model) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "pagewire",
        "max_model_len": model.max_model_len,
    }


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return ApiError.of(error).response()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    request.state.outcome = "client_gone"
    return Response(status_code=CLIENT_GONE_STATUS)


async def _http_error(request: Request, error: Exception) -> Response:
    """An unknown route, or a method that a route does not have."""
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.url.path}"
    message = f"there is no route {target}"
    if error.status_code == 405:
        message = (
            f"{target} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}"
        )
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    """A bug in the gateway; the server logs the traceback."""
    return ApiError.of(RequestError(Code.INTERNAL, "the gateway failed; see its log")).response()
