"""docs/api.md lists the fields and endpoints that work in the code."""

import json
from typing import Any

import pytest
from tools import api_tables

from pagewire.errors import RequestError
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.job_parser import JobParser

TO_DO = (
    f"docs/api.md does not say what the code does: run `{api_tables.COMMAND}` and commit the page; "
    "an endpoint that takes a body belongs to MODELS in tools/api_tables.py"
)

CHECKS = api_tables.NAMES["refused_by_checks"]


def test_the_page_has_the_tables_of_the_code() -> None:
    page = api_tables.PAGE.read_text(encoding="utf-8")
    wanted = api_tables.with_tables(page)
    differing = [line for line in wanted.splitlines() if line not in page.splitlines()]
    assert differing == [], TO_DO
    assert page == wanted, TO_DO


def states() -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in api_tables.field_table()[2:]]
    return {cells[0].strip("`"): cells[1:3] for cells in rows}


def test_states_are_those_of_the_models() -> None:
    found = states()
    assert found["temperature"] == ["works", "works"]
    assert found["user"] == ["hint", "hint"]
    assert found["suffix"] == ["refused", "refused"]
    assert found["stream_options.include_obfuscation"] == ["hint", "hint"]
    assert found["messages[].content[].text"][0] == "works"
    assert found["messages[].content[].image_url"][0] == "refused"


def test_a_field_that_the_code_gets_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: dict[str, Any] = {**CompletionRequest.refused, "brand_new": ()}
    monkeypatch.setattr(CompletionRequest, "refused", refused)
    assert states()["brand_new"] == ["", "refused"]


MINIMAL = {
    "/v1/responses": ("responses", {"input": "hi"}),
    "/v1/messages": ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
}


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path, shown in CHECKS.items() for field in shown],
)
def test_fields_that_checks_refuse_are_refused(path: str, field: str) -> None:
    route, body = MINIMAL[path]
    models = {"m": ServedModel(4096)}
    parser: Any = JobParser(BodyLimits())
    parser.parse(route, json.dumps(body).encode(), models)
    with pytest.raises(RequestError) as refused:
        parser.parse(route, json.dumps({**body, **CHECKS[path][field]}).encode(), models)
    assert refused.value.field == field


def test_no_field_of_openai_or_vllm_is_unknown() -> None:
    """Such a field must be implemented, a hint, or refused: clients expect its effect."""
    tables = [api_tables.field_table(paths) for paths in api_tables.COLUMNS.values()]
    unknown = [row for table in tables for row in table if "ignored" in row]
    assert unknown == []
