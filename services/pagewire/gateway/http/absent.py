"""Endpoints of vLLM and OpenAI that Pagewire does not have, and what to do instead."""

import re
from collections.abc import Collection, Mapping

_STATELESS = "nothing is stored"
_OPERATED = "processes are started, drained and ended by their operator"
_TEXT = "only models of text are served"
_ADAPTERS = "adapters are not supported"
_DEVELOPMENT = "for vLLM's development only"
_RENDERED = "use /tokenize"

# By method and path, as in the table of docs/api.md, which has the same words.
ABSENT: Mapping[str, str] = {
    # Before the paths of stored responses, which have the same form.
    "POST /v1/responses/input_tokens": _RENDERED,
    "POST /v1/responses/compact": "leave out the items that the model need not know",
    "GET /v1/responses/{id}": _STATELESS,
    "POST /v1/responses/{id}/cancel": _STATELESS,
    "POST /v1/chat/completions/batch": "send the requests one by one: they are batched",
    "POST /v1/chat/completions/render": _RENDERED,
    "POST /v1/completions/render": _RENDERED,
    "POST /inference/v1/generate": "token ids go to /v1/completions or gRPC",
    "POST /generative_scoring": "use prompt_logprobs",
    "GET /tokenizer_info": "it would show the model's files",
    "POST /invocations": "name the endpoint",
    "POST /pooling": "use /v1/embeddings or /v1/score",
    "POST /classify": "classifiers with several labels are not served",
    "POST /v1/audio/transcriptions": _TEXT,
    "POST /v1/audio/translations": _TEXT,
    "GET /v1/realtime": _TEXT,
    "POST /v1/load_lora_adapter": _ADAPTERS,
    "POST /v1/unload_lora_adapter": _ADAPTERS,
    "POST /reset_prefix_cache": "use cache_salt",
    "POST /abort_requests": "close the connection, or use gRPC's Abort",
    "POST /sleep": _OPERATED,
    "POST /wake_up": _OPERATED,
    "GET /is_sleeping": _OPERATED,
    "POST /pause": _OPERATED,
    "POST /resume": _OPERATED,
    "POST /scale_elastic_ep": _OPERATED,
    "GET /server_info": "see the settings page",
    "POST /collective_rpc": _DEVELOPMENT,
    "POST /start_profile": _DEVELOPMENT,
    "POST /stop_profile": _DEVELOPMENT,
}


def _pattern(endpoint: str) -> re.Pattern[str]:
    path = endpoint.partition(" ")[2]
    return re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)))


_PATTERNS = tuple((_pattern(endpoint), words) for endpoint, words in ABSENT.items())


def advice(path: str, served: Collection[str]) -> str | None:
    """What to do instead of calling a path without a route, for any method; None if unknown.

    `served` are the paths of routes: a client's base URL may lack `/v1`, or have it twice.
    """
    for pattern, words in _PATTERNS:
        if pattern.fullmatch(path):
            return words
    for meant in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        if meant != "/" and meant in served:
            return f"use {meant}; the client's base URL may be wrong"
    return None
