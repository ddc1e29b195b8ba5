"""Traces of requests over all processes, sent to an OpenTelemetry collector; off by default.

OpenTelemetry is imported by `otel` only, and that by `start_tracing` only if there is an endpoint.
Spans cost by the events of a request, never by its tokens.
"""
