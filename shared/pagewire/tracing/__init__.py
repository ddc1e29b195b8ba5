"""Traces of requests over all processes, sent to an OpenTelemetry collector; off by default.

Only `otel` imports OpenTelemetry, and only `start_tracing` imports `otel`, if there is an endpoint.
The cost of spans grows with the events of a request, never with its tokens.
"""
