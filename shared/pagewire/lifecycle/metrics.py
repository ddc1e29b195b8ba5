"""Prometheus metrics: buckets that all services share, and the HTTP endpoint."""

import asyncio
import logging

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, start_http_server

log = logging.getLogger(__name__)

# Seconds. A decode step takes 0.6 ms to 100 ms; a first token 5 ms to minutes under overload.
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REQUEST_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


def serve_metrics(host: str, port: int | None, registry: CollectorRegistry = REGISTRY) -> None:
    """Serves this process's metrics on `http://host:port/metrics`, unless `port` is None.

    Metrics have a port of their own, because clients of the service must not see them.
    """
    if port is None:
        return
    server, _ = start_http_server(port, host, registry)
    log.info("metrics on http://%s:%d/metrics", host, server.server_port)


def count_tasks(registry: CollectorRegistry = REGISTRY) -> None:
    """Publishes the number of tasks of the running event loop. A number that only grows shows tasks
    that outlive their requests."""
    loop = asyncio.get_running_loop()
    gauge = Gauge("pagewire_tasks", "Tasks of the event loop.", registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks(loop)))
