"""Spans of this process, and their export over OTLP. The only module that imports OpenTelemetry."""

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

VERSION = version("pagewire")
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_EXPORT_MS = 1000  # between two exports
_MAX_QUEUED_SPANS = 16_384  # further ones are dropped while the collector does not answer
_EXPORT_SECONDS = 5.0  # for one export

Attributes = Mapping[str, Any]


class Tracing:
    """Makes spans and sends them to `endpoint`, such as http://collector:4318.

    Without a parent a trace is recorded with probability `ratio`; with a parent, if that is
    recorded.
    """

    def __init__(self, service: str, endpoint: str, ratio: float) -> None:
        resource = Resource.create(
            {
                "service.name": f"pagewire-{service}",
                "service.version": VERSION,
                "process.pid": os.getpid(),
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=_EXPORT_SECONDS
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, schedule_delay_millis=_EXPORT_MS, max_queue_size=_MAX_QUEUED_SPANS
            )
        )
        self._tracer = self._provider.get_tracer("pagewire", VERSION)

    def serve(
        self, name: str, parent: Mapping[str, str], attributes: Attributes
    ) -> "OpenSpan | None":
        """A span of work for another process, whose W3C context is in `parent`, or a new trace.

        None if the trace is not recorded.
        """
        context = _PROPAGATOR.extract(parent, Context())
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes)
        return OpenSpan(self, span) if span.is_recording() else None

    def child(self, name: str, parent: Span, attributes: Attributes) -> "OpenSpan":
        """A span for a part of another span's work."""
        context = set_span_in_context(parent, Context())
        return OpenSpan(self, self._tracer.start_span(name, context, attributes=attributes))

    def close(self) -> None:
        """Sends queued spans; blocks for a few seconds at most."""
        self._provider.force_flush(int(1000 * _EXPORT_SECONDS))
        self._provider.shutdown()


class OpenSpan:
    """A recorded span that has not ended."""

    __slots__ = ("_span", "_tracing", "traceparent", "tracestate")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        # For child spans in other processes.
        self.traceparent = carrier[TRACEPARENT]
        self.tracestate = carrier.get(TRACESTATE, "")

    def child(self, name: str, **attributes: Any) -> "OpenSpan":
        """A span for a part of this work, from now on."""
        return self._tracing.child(name, self._span, _named(attributes))

    def event(self, name: str, at: float | None = None, **attributes: Any) -> None:
        """Records an event, now or `at` a time of time.perf_counter()."""
        self._span.add_event(name, _named(attributes), None if at is None else _wall_ns(at))

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        """Ends the span now; `error` is the reason of a failure."""
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


_PROPAGATOR = TraceContextTextMapPropagator()


def _named(attributes: Attributes) -> dict[str, Any]:
    return {f"pagewire.{name}": value for name, value in attributes.items()}


def _wall_ns(at: float) -> int:
    return time.time_ns() - int(1e9 * (time.perf_counter() - at))
