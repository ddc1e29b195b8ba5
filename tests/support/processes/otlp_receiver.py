"""A collector of traces in the test's process, by OTLP over HTTP; it stores every span."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Event:
    """An event of a span."""

    name: str
    at: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it was sent; ids are in hexadecimal, times in nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    state: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[Event]
    error: str


@dataclass
class Receiver:
    """The spans received so far."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def trace(self, trace: str) -> list[ReceivedSpan]:
        """The spans of one trace, by their start."""
        return sorted((s for s in self.spans if s.trace == trace), key=lambda s: s.start)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Runs a receiver on a free port."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tree(spans: list[ReceivedSpan]) -> str:
    """A trace as text: times in milliseconds from its beginning, spans below their parents."""
    began = min(span.start for span in spans)
    known = {span.id for span in spans}
    lines: list[str] = []

    def ms(at: int) -> str:
        return f"{(at - began) / 1e6:8.1f}"

    def add(span: ReceivedSpan, depth: int) -> None:
        shown = {k.removeprefix("pagewire."): v for k, v in span.attributes.items()}
        wanted = ("attempt", "worker", "tokens", "cached_tokens", "generated_tokens", "steps")
        text = " ".join(f"{key}={shown[key]}" for key in wanted if key in shown)
        name = "  " * depth + span.name
        service = span.service.removeprefix("pagewire-")
        lines.append(f"{ms(span.start)} {ms(span.end)}  {service:<9}  {name:<24} {text}".rstrip())
        for event in span.events:
            given = event.attributes.items()
            more = " ".join(f"{key.removeprefix('pagewire.')}={value}" for key, value in given)
            indent = "  " * depth
            lines.append(f"{ms(event.at)} {'':8}  {service:<9}  {indent}* {event.name}  {more}")
        for child in spans:
            if child.parent == span.id:
                add(child, depth + 1)

    for span in spans:
        if span.parent not in known:
            add(span, 0)
    return "\n".join(lines)


def _spans(message: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for of_resource in message.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield ReceivedSpan(
                    resource["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    [
                        Event(e.name, e.time_unix_nano, _attributes(e.attributes))
                        for e in span.events
                    ],
                    span.status.message,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
