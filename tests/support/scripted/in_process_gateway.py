"""The gateway's application without an HTTP server, with gRPC to a scripted scheduler."""

import contextlib
from collections.abc import AsyncIterator

import httpx

from pagewire.addresses import parse_addresses
from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


@contextlib.asynccontextmanager
async def in_process_gateway(
    scheduler: ScriptedScheduler,
    max_body_bytes: int = 1 << 20,
    max_open_requests: int = 64,
    resume_seconds: float = 30.0,
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the application; waits until the scheduler is ready."""
    metrics = GatewayMetrics()
    schedulers = Schedulers(
        parse_addresses(await scheduler.start()), metrics, resume_seconds=resume_seconds
    )
    await schedulers.start()
    await eventually(lambda: schedulers.ready)
    gateway = Gateway(schedulers, metrics, max_body_bytes, max_open_requests)
    transport = httpx.ASGITransport(create_app(gateway))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client
    finally:
        await gateway.parser.close()
        await schedulers.close()
        await scheduler.stop()
