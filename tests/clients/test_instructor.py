"""instructor: models of pydantic as answers."""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, field_validator

from clients.servers import EMBEDDED, TEXT, Servers
from support.scripted.asked_text import ask

instructor = pytest.importorskip("instructor", reason="client libraries need make clients")

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


class Animal(BaseModel, extra="forbid"):
    """An animal."""

    size: Literal["small", "large"]
    legs: Literal[2, 4]


class Even(BaseModel):
    """An even number."""

    number: int

    @field_validator("number")
    @classmethod
    def _even(cls, number: int) -> int:
        if number % 2:
            raise ValueError(ask('```json\n{"number": 8}\n```'))
        return number


def client(url: str, mode: str) -> Any:
    made = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    return instructor.from_openai(made, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_an_object(servers: Servers, mode: str) -> None:
    limit = "max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens"
    found = client(servers.embedded, mode).chat.completions.create(
        model=EMBEDDED,
        response_model=Animal,
        messages=[{"role": "user", "content": "A fox?"}],
        max_retries=0,
        **{limit: 200},
    )
    assert isinstance(found, Animal)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_object_grows_in_a_stream(servers: Servers, mode: str) -> None:
    parts = client(servers.embedded, mode).chat.completions.create_partial(
        model=EMBEDDED,
        response_model=Animal,
        messages=[{"role": "user", "content": "A fox?"}],
        max_tokens=200,
    )
    found = list(parts)
    assert len(found) > 2
    assert Animal.model_validate(found[-1].model_dump())


def test_an_answer_that_is_not_valid_is_asked_for_again(servers: Servers) -> None:
    found = client(servers.text, "MD_JSON").chat.completions.create(
        model=TEXT,
        response_model=Even,
        messages=[{"role": "user", "content": ask('```json\n{"number": 7}\n```')}],
        max_retries=2,
    )
    assert found.number == 8
