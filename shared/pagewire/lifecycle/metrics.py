"""Prometheus metrics: buckets that every service shares, and their HTTP endpoint."""

import asyncio
import logging

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, start_http_server

log = logging.getLogger(__name__)

# Seconds. A decode step takes 0.6 ms to 100 ms; a first token 5 ms to minutes under overload.
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REQUEST_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


def serve_metrics(host: str, port: int | None, registry: CollectorRegistry = REGISTRY) -> None:
    """Serves this process's metrics on `http://host:port/metrics`; nothing when port is None.

    They have a port of their own because they tell more than clients should know.
    """
    if port is None:
        return
    server, _ = start_http_server(port, host, registry)
    log.info("metrics on http://%s:%d/metrics", host, server.server_port)


def count_tasks(registry: CollectorRegistry = REGISTRY) -> None:
    """Publishes how many tasks the running event loop has: those of requests must not outlive
    them."""
    loop = asyncio.get_running_loop()
    gauge = Gauge("pagewire_tasks", "Tasks of the event loop.", registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks(loop)))
