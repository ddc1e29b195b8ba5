"""Spans: their parents, which are recorded, and the context that is passed on."""

from collections.abc import Iterator

import pytest

from pagewire.tracing.otel import Tracing
from support.processes.otlp_receiver import Receiver, otlp_receiver
from support.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


def parent(flags: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "vendor=x"}


def test_spans_are_sent_with_their_parents_and_events(receiver: Receiver) -> None:
    tracing = Tracing("gateway", receiver.endpoint, 1.0)
    span = tracing.serve("outer", parent("01"), {"a": 1})
    assert span is not None
    assert span.traceparent.startswith(f"00-{TRACE}-")
    assert span.tracestate == "vendor=x"
    span.event("it happened", count=2)
    child = span.child("inner", attempt=1)
    child.end("it failed")
    span.end()
    tracing.close()
    until(lambda: len(receiver.spans) == 2)
    outer, inner = receiver.trace(TRACE)
    assert (outer.service, outer.parent, outer.attributes) == ("pagewire-gateway", SPAN, {"a": 1})
    assert [(e.name, e.attributes) for e in outer.events] == [
        ("it happened", {"pagewire.count": 2})
    ]
    assert (inner.parent, inner.error) == (outer.id, "it failed")


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_client_decides_about_its_trace_and_the_ratio_about_others(ratio: float) -> None:
    tracing = Tracing("gateway", "http://127.0.0.1:9", ratio)
    assert tracing.serve("x", parent("00"), {}) is None
    assert tracing.serve("x", parent("01"), {}) is not None
    assert (tracing.serve("x", {}, {}) is not None) == bool(ratio)
    assert (tracing.serve("x", {"traceparent": "nonsense"}, {}) is not None) == bool(ratio)
