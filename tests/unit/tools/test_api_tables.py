"""docs/api.md says which fields and endpoints work, as the code has them."""

from typing import Any

import pytest
from tools import api_tables

from pagewire.gateway.api.completions import CompletionRequest

TO_DO = (
    f"docs/api.md does not say what the code does: run `{api_tables.COMMAND}` and commit the page; "
    "an endpoint that takes a body belongs to MODELS in tools/api_tables.py"
)


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


def test_no_field_of_openai_or_vllm_is_unknown() -> None:
    """Such a field must be implemented, a hint, or refused: clients know what it should do."""
    unknown = [name for name, cells in states().items() if "ignored" in cells]
    assert unknown == []
