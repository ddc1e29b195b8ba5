"""Prometheus metrics: buckets that all services share, and the HTTP endpoint."""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagewire.addresses import is_fault_of_port

log = logging.getLogger(__name__)

# Seconds. A decode step takes 0.6 ms to 100 ms; a first token 5 ms to minutes under overload.
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REQUEST_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class StepCounter(Collector):
    """A counter for events of every step. Only one thread may use it: it has no lock."""

    def __init__(
        self, name: str, documentation: str, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._value = 0
        registry.register(self)

    def inc(self, amount: int) -> None:
        """Adds to the counter."""
        self._value += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counter, for the registry."""
        yield CounterMetricFamily(self._name, self._documentation, self._value)

    describe = collect


class StepHistogram(Collector):
    """A histogram for values of every step. Only one thread may use it: it has no lock."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`buckets` are the upper bounds, ascending; one without a bound is added."""
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The histogram, for the registry."""
        names = (*map(floatToGoString, self._bounds), "+Inf")
        counts = accumulate(self._counts.copy())
        yield HistogramMetricFamily(
            self._name,
            self._documentation,
            list(zip(names, counts, strict=True)),
            self._sum,
        )

    describe = collect


def serve_metrics(host: str, port: int | None, registry: CollectorRegistry = REGISTRY) -> None:
    """Serves this process's metrics on `http://host:port/metrics`, unless `port` is None.

    Metrics have a port of their own, because clients of the service must not see them. OSError if
    they cannot be served there.
    """
    if port is None:
        return
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        other = "port of metrics" if is_fault_of_port(error) else "--metrics-host"
        raise OSError(
            f"cannot serve metrics on {host}:{port}: {error.strerror or error}; choose another "
            f"{other}"
        ) from error
    log.info("metrics on http://%s:%d/metrics", host, server.server_port)


def count_tasks(registry: CollectorRegistry = REGISTRY) -> None:
    """Publishes the number of tasks of the running event loop. A number that only grows shows tasks
    that outlive their requests."""
    loop = asyncio.get_running_loop()
    gauge = Gauge("pagewire_tasks", "Tasks of the event loop.", registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks(loop)))
