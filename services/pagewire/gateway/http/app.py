"""The routes."""

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
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.openapi import PATH, document
from pagewire.gateway.api.parser import Parser
from pagewire.gateway.api.parsing import Route
from pagewire.gateway.auth.access import AccessControl
from pagewire.gateway.errors import CLIENT_GONE_STATUS, RETRY_AFTER, ApiError, ClientGoneError
from pagewire.gateway.http.answer import answer
from pagewire.gateway.http.body import read_body
from pagewire.gateway.http.cross_origin import allow_origins
from pagewire.gateway.http.traffic import Traffic
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

GENERATING = ("/v1/chat/completions", "/v1/completions")


@dataclass(slots=True)
class Gateway:
    """The state of one gateway process. Once `draining`, it takes no more requests."""

    schedulers: Schedulers
    metrics: GatewayMetrics
    max_body_bytes: int
    max_open_requests: int
    guard: AccessControl = field(default_factory=AccessControl)
    cors_origins: tuple[str, ...] = ()
    describe: bool = False
    max_open_body_bytes: int = 1 << 30
    limits: BodyLimits = field(default_factory=BodyLimits)
    parser_processes: int = GatewayConfig.parser_processes
    parse_timeout: float = GatewayConfig.parse_timeout
    traffic: Traffic = field(init=False)
    parser: Parser = field(init=False)
    draining: bool = False

    def __post_init__(self) -> None:
        self.traffic = Traffic(
            self.metrics,
            GENERATING,
            self.max_open_requests,
            max(self.max_open_body_bytes, self.max_body_bytes),
            lambda: self.schedulers.retry_after,
        )
        self.parser = Parser(
            self.limits, self.max_body_bytes, self.parser_processes, self.parse_timeout
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
        """GET /healthz: the process answers."""
        return JSONResponse({"status": "ok"})

    async def readyz(self) -> JSONResponse:
        """GET /readyz: requests are taken and some scheduler can run them."""
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
        models = {name: model.max_model_len for name, model in self.schedulers.models().items()}
        job = await self.parser.job(route, body, models, request.receive)
        del body
        bill = self.guard.admit(request.scope, job, models[job.reply.envelope.model])
        return await answer(job, self.schedulers, request.receive, bill, arrived)


def create_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application; every error has OpenAI's body."""
    app = FastAPI(title="Pagewire", openapi_url=None, redirect_slashes=False)
    app.add_api_route("/v1/chat/completions", gateway.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", gateway.completions, methods=["POST"], response_model=None)
    for path, endpoint in (
        ("/v1/models", gateway.models),
        ("/v1/models/{model:path}", gateway.model),
        ("/healthz", gateway.healthz),
        ("/readyz", gateway.readyz),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    if gateway.describe:
        described = JSONResponse(document())
        app.add_route(PATH, lambda _: described, methods=["GET"])
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    guarded = gateway.guard.watch(app, GENERATING)
    # Outermost, for a page may read a refusal only if that allows it too.
    return allow_origins(gateway.traffic.watch(guarded), gateway.cors_origins)


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
    """A route or a method that does not exist."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = f"there is no route {what}"
    if error.status_code == 405:
        message = (
            f"{what} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}"
        )
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of the gateway; the server logs the traceback."""
    return ApiError.of(RequestError(Code.INTERNAL, "the gateway failed; see its log")).response()
