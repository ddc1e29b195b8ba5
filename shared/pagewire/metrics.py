"""Prometheus metrics: buckets that every service shares, and their HTTP endpoint."""

import logging

from prometheus_client import start_http_server

log = logging.getLogger(__name__)

# Seconds. A decode step takes 0.6 ms to 100 ms; a first token 5 ms to minutes under overload.
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REQUEST_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


def serve_metrics(host: str, port: int | None) -> None:
    """Serves this process's metrics on `http://host:port/metrics`; nothing when port is None."""
    if port is None:
        return
    start_http_server(port, host)
    log.info("metrics on http://%s:%d/metrics", host, port)
