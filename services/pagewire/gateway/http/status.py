"""The status of the gateway and of its models: health, load, metrics, version."""

import asyncio
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagewire.gateway.api.messages.errors import is_anthropic
from pagewire.gateway.errors import RETRY_AFTER
from pagewire.gateway.http.models import anthropic_card, model_card, model_list
from pagewire.gateway.http.traffic import Traffic
from pagewire.gateway.routing.schedulers import Schedulers


class Status:
    """The routes that read the gateway's state. While `draining`, it is not ready."""

    def __init__(
        self, schedulers: Schedulers, traffic: Traffic, registry: CollectorRegistry
    ) -> None:
        self.draining = False
        self._schedulers = schedulers
        self._traffic = traffic
        self._registry = registry

    async def models(self, request: Request) -> JSONResponse:
        """The served models."""
        served = self._schedulers.models()
        listed = [served[name] for name in sorted(served)]
        return JSONResponse(model_list(listed, is_anthropic(request.scope)))

    async def model(self, request: Request, model: str) -> JSONResponse:
        """One served model."""
        card = anthropic_card if is_anthropic(request.scope) else model_card
        return JSONResponse(card(self._schedulers.model(model)))

    async def healthz(self) -> JSONResponse:
        """The process is running."""
        return JSONResponse({"status": "ok"})

    async def readyz(self) -> JSONResponse:
        """Whether requests are accepted and some scheduler can run them, and if not, why."""
        reason = self._not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": reason}, 503, headers=RETRY_AFTER)

    async def health(self) -> Response:
        """The same as /readyz without a body, as vLLM answers."""
        if self._not_ready() is None:
            return Response(status_code=200)
        return Response(status_code=503, headers=RETRY_AFTER)

    async def load(self) -> JSONResponse:
        """The generating requests that this gateway is answering now."""
        return JSONResponse({"server_load": self._traffic.num_generating})

    async def version(self) -> JSONResponse:
        """The version of Pagewire."""
        return JSONResponse({"version": version("pagewire")})

    async def metrics(self, request: Request) -> Response:
        """The gateway's metrics in the format that the scraper prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # In a thread: a scrape reads hundreds of samples.
        text = await asyncio.to_thread(encode, self._registry)
        return Response(text, headers={"content-type": content_type})

    def _not_ready(self) -> str | None:
        if self.draining:
            return "draining"
        return None if self._schedulers.ready else "no ready scheduler"
