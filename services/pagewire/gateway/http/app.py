"""The gateway's ASGI application and its routes."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError
from pagewire.gateway.answers.answer import answer
from pagewire.gateway.api import chat, completions, tokenization
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.messages import request as messages
from pagewire.gateway.api.pooling import embeddings, scores
from pagewire.gateway.api.responses import request as responses
from pagewire.gateway.auth.access import OPEN_PATHS, AccessControl
from pagewire.gateway.error_responses import error_response
from pagewire.gateway.errors import (
    CLIENT_GONE_STATUS,
    DRAINING_HEADER,
    RETRY_AFTER,
    ApiError,
    ClientGoneError,
)
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.http import models
from pagewire.gateway.http.absent import advice
from pagewire.gateway.http.body import read_body
from pagewire.gateway.http.cross_origin import allow_origins
from pagewire.gateway.http.request_log import GENERATIONS
from pagewire.gateway.http.request_trace import TRACE
from pagewire.gateway.http.routes import DESCRIPTION_PATHS, Routes
from pagewire.gateway.http.status import Status
from pagewire.gateway.http.text_calls import answer_text_call
from pagewire.gateway.http.traffic import Traffic, too_many_waiting
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.models import find_model
from pagewire.gateway.page.engine_view import EVENTS_PATH, EngineView
from pagewire.gateway.page.files import page_files
from pagewire.gateway.page.playground import KILL_PATH, PLAYGROUND_PATH, Playground
from pagewire.gateway.parsing.job_parser import Route, TextRoute
from pagewire.gateway.parsing.parser_pool import ParserPool
from pagewire.gateway.parsing.unknown_fields import IGNORED_HEADER
from pagewire.gateway.request_ids import STATE, identified
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.lifecycle.logs import set_request_id

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing

log = logging.getLogger(__name__)

# The paths of requests that workers compute: text or vectors. They are limited, charged and timed.
GENERATING = (
    chat.PATH,
    completions.PATH,
    responses.PATH,
    messages.PATH,
    embeddings.PATH,
    *scores.SCORE_PATHS,
    *scores.RERANK_PATHS,
)
# The paths that show other clients' requests or end workers: they need an operator's key.
OPERATOR_PATHS = frozenset({EVENTS_PATH, KILL_PATH})
# The paths of other requests with a body. They are limited, and count as requests of their key.
COUNTED = (tokenization.TOKENIZE_PATH, tokenization.DETOKENIZE_PATH, messages.COUNT_PATH)


@dataclass(slots=True)
class Gateway:
    """The state of one gateway process. While `status.draining` it refuses new requests."""

    schedulers: Schedulers
    metrics: GatewayMetrics
    max_body_bytes: int
    max_open_requests: int
    access: AccessControl = field(default_factory=AccessControl)
    cors_origins: tuple[str, ...] = ()
    describe: bool = GatewayConfig.openapi
    shows_metrics: bool = GatewayConfig.api_metrics
    max_open_body_bytes: int = GatewayConfig.max_open_body_bytes
    limits: BodyLimits = field(default_factory=BodyLimits)
    parser_processes: int = GatewayConfig.parser_processes
    parse_timeout: float = GatewayConfig.parse_timeout
    strict_fields: bool = GatewayConfig.strict_fields
    tracing: "Tracing | None" = None
    page: bool = GatewayConfig.page
    playground_socket: str | None = None
    traffic: Traffic = field(init=False)
    parser: ParserPool = field(init=False)
    status: Status = field(init=False)
    engine: EngineView = field(init=False)
    playground: Playground = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = Traffic(
            self.metrics,
            GENERATING,
            self.max_open_requests,
            max(self.max_open_body_bytes, self.max_body_bytes),
            lambda: self.schedulers.retry_after,
            COUNTED,
            self.tracing,
        )
        self.status = Status(self.schedulers, self.traffic, self.metrics.registry)
        self.engine = EngineView(self.schedulers, self.metrics)
        self.playground = Playground(self.playground_socket, self.engine.busiest_worker)
        self.parser = ParserPool(
            self.limits,
            self.max_body_bytes,
            self.parser_processes,
            self.parse_timeout,
            self.strict_fields,
        )

    async def chat(self, request: Request) -> Response:
        """The assistant's next message in a chat, streamed or whole."""
        return await self._generate(request, "chat")

    async def completions(self, request: Request) -> Response:
        """The continuation of one or more prompts, streamed or whole."""
        return await self._generate(request, "completions")

    async def responses(self, request: Request) -> Response:
        """The response to a conversation, streamed or whole."""
        return await self._generate(request, "responses")

    async def messages(self, request: Request) -> Response:
        """The assistant's next message, in Anthropic's form, streamed or whole."""
        return await self._generate(request, "messages")

    async def embeddings(self, request: Request) -> Response:
        """The embedding of each input."""
        return await self._generate(request, "embeddings")

    async def score(self, request: Request) -> Response:
        """The score of each pair of texts."""
        return await self._generate(request, "score")

    async def rerank(self, request: Request) -> Response:
        """Documents in the order of their scores for a query."""
        return await self._generate(request, "rerank")

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of a conversation in Anthropic's form."""
        return await self._call(request, "count_tokens")

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a chat."""
        return await self._call(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self._call(request, "detokenize")

    async def _generate(self, request: Request, route: Route) -> Response:
        body = await self._body(request)
        arrived = time.perf_counter()
        served = self.schedulers.served()
        job = await self.parser.parse(route, body, served, request.receive)
        self._count(request, job.model, len(body), len(served))
        if len(served) > 1 and (seconds := self.schedulers.retry_after_for(job.model)):
            raise too_many_waiting(seconds, job.model)
        del body
        job = identified(job, request.scope["state"])
        _, model = find_model(job.model, served)
        charge = self.access.charge(request.scope, job, model.max_model_len)
        state = request.scope["state"]
        set_request_id(state[STATE])
        response = await answer(
            job,
            self.schedulers,
            request.receive,
            charge,
            arrived,
            partial(_follow, state),
        )
        return _naming_ignored(response, job.ignored)

    async def _call(self, request: Request, route: TextRoute) -> Response:
        body = await self._body(request)
        served = self.schedulers.served()
        call = await self.parser.text_call(route, body, served, request.receive)
        self._count(request, call.model, len(body), len(served))
        response = await answer_text_call(call, self.parser, self.schedulers, request.receive)
        return _naming_ignored(response, call.ignored)

    def _count(self, request: Request, model: str, num_bytes: int, num_models: int) -> None:
        self.traffic.count_for_model(request.scope["state"], model, num_bytes, num_models)

    async def _body(self, request: Request) -> bytearray:
        if self.status.draining:
            refusal = ApiError.of(RequestError(Code.UNAVAILABLE, "the gateway is shutting down"))
            # The last header shows a proxy that another gateway may serve the request.
            refusal.headers = {**RETRY_AFTER, "connection": "close", DRAINING_HEADER: "true"}
            raise refusal
        return await read_body(request, self.max_body_bytes)


def create_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application; every error has the body of the API that its path belongs to."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    routes = Routes(app)
    _add_routes(routes, gateway)
    open_paths = OPEN_PATHS
    if gateway.describe:
        routes.describe()
        open_paths |= DESCRIPTION_PATHS
    if gateway.page:
        open_paths |= _add_page(routes, gateway)
    routes.allow_head()
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    with_access = gateway.access.wrap(app, GENERATING, COUNTED, open_paths, OPERATOR_PATHS)
    # The outermost layer: a page can read a refusal only if it has these headers too.
    return allow_origins(gateway.traffic.wrap(with_access), gateway.cors_origins)


def _add_routes(routes: Routes, gateway: Gateway) -> None:
    status = gateway.status
    post, get = routes.post, routes.get
    post(chat.PATH, gateway.chat, "createChatCompletion", chat.ChatRequest, streams=True)
    post(
        completions.PATH,
        gateway.completions,
        "createCompletion",
        completions.CompletionRequest,
        streams=True,
    )
    post(
        responses.PATH,
        gateway.responses,
        "createResponse",
        responses.ResponsesRequest,
        streams=True,
    )
    post(messages.PATH, gateway.messages, "createMessage", messages.MessagesRequest, streams=True)
    post(messages.COUNT_PATH, gateway.count_tokens, "countTokens", messages.MessagesRequest)
    post(embeddings.PATH, gateway.embeddings, "createEmbedding", embeddings.EmbeddingRequest)
    for path, name in zip(scores.SCORE_PATHS, ("score", "scoreUnversioned"), strict=True):
        post(path, gateway.score, name, scores.ScoreRequest)
    names = ("rerank", "rerankUnversioned", "rerankAsCohere")
    for path, name in zip(scores.RERANK_PATHS, names, strict=True):
        post(path, gateway.rerank, name, scores.RerankRequest)
    post(tokenization.TOKENIZE_PATH, gateway.tokenize, "tokenize", tokenization.TokenizeRequest)
    post(
        tokenization.DETOKENIZE_PATH,
        gateway.detokenize,
        "detokenize",
        tokenization.DetokenizeRequest,
    )
    get(models.PATH, status.models, "listModels")
    get(models.PATH + "/{model:path}", status.model, "getModel")
    get("/health", status.health, "health")
    get("/ping", status.health, "ping")
    post("/ping", status.health, "postPing")
    get("/healthz", status.healthz, "healthz")
    get("/readyz", status.readyz, "readyz")
    get("/load", status.load, "load")
    get("/version", status.version, "version")
    if gateway.shows_metrics:
        get("/metrics", status.metrics, "metrics")


def _follow(state: dict[str, Any], generations: Sequence[Generation]) -> None:
    """Stores a request's generations for its log line, and its span in the generations."""
    state[GENERATIONS] = generations
    if (span := state.get(TRACE)) is not None:
        for generation in generations:
            generation.trace = span


def _add_page(routes: Routes, gateway: Gateway) -> frozenset[str]:
    """Adds the page. Returns paths that need no key: their answers are the same for all clients."""
    routes.get_unlisted(EVENTS_PATH, gateway.engine.events)
    routes.get_unlisted(PLAYGROUND_PATH, gateway.playground.state)
    routes.post_unlisted(KILL_PATH, gateway.playground.kill)
    files = page_files()
    for path, file in files.items():
        routes.get_unlisted(path, file.answer)
    return frozenset({PLAYGROUND_PATH, *files})


def _naming_ignored(response: Response, ignored: tuple[str, ...]) -> Response:
    if ignored:
        response.headers[IGNORED_HEADER] = ", ".join(ignored)
    return response


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(ApiError.of(error), request.scope)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _client_gone(request: Request, error: Exception) -> Response:
    request.state.outcome = "client_gone"
    return Response(status_code=CLIENT_GONE_STATUS)


async def _http_error(request: Request, error: Exception) -> Response:
    """An unknown route, or a method that a route does not have."""
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.url.path}"
    message, headers = f"there is no route {target}", error.headers
    if error.status_code == 404:
        served = {route.path for route in request.app.routes}
        if (words := advice(request.url.path, served)) is not None:
            message += f": {words}"
    if error.status_code == 405:
        allowed = ", ".join(sorted((headers or {}).get("Allow", "").split(", ")))
        message, headers = f"{target} is not allowed; use {allowed}", {"allow": allowed}
    return error_response(ApiError(error.status_code, message, headers=headers), request.scope)


async def _unexpected(request: Request, error: Exception) -> Response:
    """A bug in the gateway; the server logs the traceback."""
    log.error("the gateway failed")  # the line has the request's id
    failure = RequestError(Code.INTERNAL, "the gateway failed; see its log")
    return error_response(ApiError.of(failure), request.scope)
