"""The tables of docs/api.md with the fields and endpoints of OpenAI and vLLM that work here.

    python tools/api_tables.py            writes them
    python tools/api_tables.py --check    exits with status 1 if they are not those of the code

The states come from the code: a field works if a request's model declares it, and a route if the
application has it. `hints` and `refused` of the models have the other states. api_names.json has
the names that OpenAI and vLLM document; names that only the code has are added.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
from pydantic import BaseModel

from pagewire.gateway.api import chat, completions, tokenization
from pagewire.gateway.api.fields import Strict
from pagewire.gateway.api.messages import request as messages
from pagewire.gateway.api.pooling import embeddings, scores
from pagewire.gateway.api.responses import request as responses
from pagewire.gateway.http.absent import ABSENT
from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers

PAGE = Path(__file__).parents[1] / "docs/api.md"
COMMAND = "python tools/api_tables.py"

MODELS: dict[str, type[Strict]] = {
    chat.PATH: chat.ChatRequest,
    completions.PATH: completions.CompletionRequest,
    tokenization.TOKENIZE_PATH: tokenization.TokenizeRequest,
    tokenization.DETOKENIZE_PATH: tokenization.DetokenizeRequest,
    responses.PATH: responses.ResponsesRequest,
    messages.PATH: messages.MessagesRequest,
    embeddings.PATH: embeddings.EmbeddingRequest,
    scores.SCORE_PATH: scores.ScoreRequest,
    scores.RERANK_PATH: scores.RerankRequest,
}
# The tables of fields, each with the endpoints that are its columns.
COLUMNS = {
    "fields": (
        chat.PATH,
        completions.PATH,
        tokenization.TOKENIZE_PATH,
        tokenization.DETOKENIZE_PATH,
    ),
    "fields of Responses and Messages": (responses.PATH, messages.PATH),
    "fields without output": (embeddings.PATH, scores.SCORE_PATH, scores.RERANK_PATH),
}

# Names of OpenAI's API and of vLLM's server, as of November 2026. `fields` are by endpoint, several
# in a string; `common` are those of chat and completions. `refused_by_checks` are fields that a
# model declares and then refuses, each with a body that shows it. `endpoints` are in the table's
# order; gateway/http/absent.py has the advice for those that are missing here.
NAMES = json.loads((Path(__file__).parent / "api_names.json").read_text(encoding="utf-8"))


def field_table(paths: tuple[str, ...] = COLUMNS["fields"]) -> list[str]:
    """A row for each field, with its state in these endpoints."""
    states = {path: _states(path) for path in paths}
    names = sorted(
        {name for known in states.values() for name in known},
        key=lambda name: (name.count("."), name),
    )
    head = ["field", *(f"`{path}`" for path in paths)]
    rows = [[f"`{name}`", *(states[path].get(name, "") for path in paths)] for name in names]
    return [*map(_row, [head, ["---"] * len(head), *rows])]


def endpoint_table() -> list[str]:
    """A row for each endpoint: `works`, or why it is missing."""
    served, endpoints = set(_served()), NAMES["endpoints"]
    names = [*endpoints, *sorted(served - set(endpoints))]
    rows = [[f"`{name}`", "works" if name in served else f"404: {ABSENT[name]}"] for name in names]
    return [*map(_row, [["endpoint", "state"], ["---"] * 2, *rows])]


def with_tables(page: str) -> str:
    """The page with the tables of the code."""
    tables = {name: field_table(paths) for name, paths in COLUMNS.items()}
    for name, table in {**tables, "endpoints": endpoint_table()}.items():
        begin, end = f"<!-- {name}: {COMMAND} -->\n", f"<!-- end of {name} -->"
        head, found, rest = page.partition(begin)
        if not found:
            raise ValueError(f"{PAGE.name} has no line {begin.strip()}")
        page = "".join([head, begin, *(f"{line}\n" for line in table), end, rest.partition(end)[2]])
    return page


def _states(path: str) -> dict[str, str]:
    """The state of each field of an endpoint: its own fields, and those of OpenAI and vLLM."""
    groups = [path, "common"] if path in (chat.PATH, completions.PATH) else [path]
    known = " ".join(text for group in groups for text in NAMES["fields"][group]).split()
    states = dict.fromkeys(known, "ignored")
    for prefix, model in _objects(MODELS[path], ""):
        states |= {prefix + name: "refused" for name in model.refused}
        works = {prefix + (field.alias or name) for name, field in model.model_fields.items()}
        states |= dict.fromkeys(works, "works")
        states |= {prefix + name: "hint" for name in model.hints}
    return states | dict.fromkeys(NAMES["refused_by_checks"].get(path, ()), "refused")


def _objects(model: type[Strict], prefix: str) -> Iterator[tuple[str, type[Strict]]]:
    """A model and the models of its objects, each with the prefix of its fields."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for inner, in_list in _inner_models(field.annotation, in_list=False):
            yield from _objects(inner, f"{prefix}{name}{'[]' if in_list else ''}.")


def _inner_models(annotation: Any, in_list: bool) -> Iterator[tuple[type[Strict], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if issubclass(annotation, Strict):
            yield annotation, in_list
        return
    is_list = in_list or getattr(annotation, "__origin__", None) is list
    for part in get_args(annotation):
        yield from _inner_models(part, is_list)


def _served() -> Iterator[str]:
    """The routes of a gateway with default settings, by its own description."""
    for path, methods in asyncio.run(_description())["paths"].items():
        yield from (f"{method.upper()} {path}" for method in methods if method != "head")
    yield from ("GET /docs", "GET /openapi.json")


async def _description() -> Any:
    metrics = GatewayMetrics()
    app = create_app(Gateway(Schedulers([], metrics), metrics, 1, 1))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway"
    ) as client:
        for path in ("/docs", "/openapi.json"):
            answer = await client.get(path)
            answer.raise_for_status()
        return answer.json()


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Writes the tables, or with --check compares them; returns the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_tables(page)
    if "--check" in sys.argv[1:]:
        if page != wanted:
            print(f"{PAGE.name} does not say what the code does; run `{COMMAND}`")
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
