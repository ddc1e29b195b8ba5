"""One log line for each HTTP request: its outcome, tokens and times, never its text."""

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from starlette.types import Scope

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.request_ids import STATE
from pagewire.lifecycle.logs import fields

log = logging.getLogger(__name__)

# The key of the generations in the state of a request.
GENERATIONS = "generations"

# Paths that probes and scrapers request repeatedly: their log lines are details.
_POLLED = frozenset({"/health", "/healthz", "/readyz", "/ping", "/metrics", "/load"})

_MAX_PATH = 120  # characters of a path without a route


def log_request(scope: Scope, route: str, outcome: str, began: float, seconds: float) -> None:
    """Writes the line of a request that has ended.

    `route` is "other" for a path without a route. `outcome` is the status, or the reason why the
    answer is not complete. `began` is the request's arrival, by time.perf_counter().
    """
    level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
    if not log.isEnabledFor(level):
        return
    path = _shown(scope["path"]) if route == "other" else route
    values = _values(scope, path, outcome, seconds)
    generations = scope["state"].get(GENERATIONS, ())
    if generations:
        values |= _generated(generations, began)
    text = " ".join(f"{name}={value}" for name, value in values.items() if name not in _IN_HEAD)
    log.log(level, "%s %s %s %s", scope["method"], path, outcome, text, extra=fields(**values))


_IN_HEAD = ("method", "path", "outcome")


def _values(scope: Scope, path: str, outcome: str, seconds: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "method": scope["method"],
        "path": path,
        "outcome": int(outcome) if outcome.isdecimal() else outcome,
        "duration": round(seconds, 4),
    }
    if request_id := scope["state"].get(STATE):
        values["request_id"] = request_id
    return values


def _generated(generations: Sequence[Generation], began: float) -> dict[str, Any]:
    """Tokens, time to the first token, and moves of all generations of a request."""
    first_tokens = [g.first_token_at for g in generations if g.first_token_at]
    by_prompt = groupby(generations, key=lambda generation: generation.prompt_index)
    values: dict[str, Any] = {
        "model": generations[0].model,
        "prompt_tokens": sum(max(g.used_prompt_tokens for g in group) for _, group in by_prompt),
        "tokens": sum(generation.used_tokens for generation in generations),
    }
    if first_tokens:
        values["ttft"] = round(min(first_tokens) - began, 4)
    values["resumes"] = sum(generation.resumes for generation in generations)
    values["preemptions"] = sum(generation.preemptions for generation in generations)
    return values


def _shown(path: str) -> str:
    """A path chosen by a client, on one line and shortened."""
    return ascii(path[:_MAX_PATH])[1:-1]
