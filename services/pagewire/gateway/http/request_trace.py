"""The span of a traced HTTP request: taken from its W3C headers, passed on to schedulers."""

from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from pagewire.gateway.http.request_log import GENERATIONS
from pagewire.gateway.request_ids import STATE

if TYPE_CHECKING:
    from pagewire.tracing.otel import OpenSpan, Tracing

# The key of the span in the state of a request, if it is traced.
TRACE = "trace"


def begin_trace(tracing: "Tracing", scope: Scope) -> "OpenSpan | None":
    """The span of a request that has arrived; None if it is not traced."""
    parent = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope.get("headers", ())
        if name in (b"traceparent", b"tracestate")
    }
    method, path = scope["method"], scope["path"]
    attributes = {"http.request.method": method, "http.route": path}
    return tracing.serve(f"{method} {path}", parent, attributes)


def end_trace(span: "OpenSpan", scope: Scope, outcome: str) -> None:
    """Ends the span of a request; `outcome` is as in its log line."""
    state = scope["state"]
    attributes: dict[str, Any] = {"pagewire.outcome": outcome}
    if outcome.isdecimal():
        attributes["http.response.status_code"] = int(outcome)
    if request_id := state.get(STATE):
        attributes["pagewire.request_id"] = request_id
    generations = state.get(GENERATIONS, ())
    if generations:
        attributes["gen_ai.request.model"] = generations[0].model
        tokens = sum(generation.used_tokens for generation in generations)
        attributes["gen_ai.usage.output_tokens"] = tokens
        attributes["pagewire.resumes"] = sum(g.resumes for g in generations)
        first = [g.first_token_at for g in generations if g.first_token_at]
        if first:
            span.event("first token", at=min(first))
    span.set(attributes)
    failed = outcome == "failed" or outcome.startswith("5")
    span.end(f"the request ended with {outcome}" if failed else "")
