"""LangChain's ChatOpenAI, over Chat Completions and Responses."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from clients.servers import EMBEDDED, TEXT, Servers
from support.scripted.asked_text import ask, call

langchain = pytest.importorskip("langchain_openai", reason="client libraries need make clients")
from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402

APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return ask(f"It is sunny in {city}.")


class Animal(BaseModel, extra="forbid"):
    """An animal."""

    size: Literal["small", "large"]
    legs: Literal[2, 4]


def model(url: str, name: str, **fields: Any) -> Any:
    return langchain.ChatOpenAI(
        base_url=f"{url}/v1", model=name, api_key="x", max_retries=0, **fields
    )


@APIS
def test_a_text_and_its_stream(servers: Servers, responses: bool) -> None:
    chat = model(servers.text, TEXT, use_responses_api=responses, stream_usage=True)
    answer = chat.invoke(ask("Grüße 🙂 to you"))
    assert answer.text == "Grüße 🙂 to you"
    chunks = list(chat.stream(ask("Grüße 🙂 to you")))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert len([chunk for chunk in chunks if chunk.text]) > 3
    counted = sum(chunks[1:], chunks[0]).usage_metadata
    assert counted["output_tokens"] == answer.usage_metadata["output_tokens"] > 5


@APIS
def test_bound_tools(servers: Servers, responses: bool) -> None:
    chat = model(servers.text, TEXT, use_responses_api=responses).bind_tools([weather])
    asked = HumanMessage(ask(f"Let me look.\n{call('weather', json.dumps({'city': 'Köln'}))}"))
    answer = chat.invoke([asked])
    [made] = answer.tool_calls
    assert (made["name"], made["args"]) == ("weather", {"city": "Köln"})
    assert answer.text == "Let me look."
    result = weather.invoke(made)
    assert isinstance(result, ToolMessage)
    assert chat.invoke([asked, answer, result]).text == "It is sunny in Köln."


@APIS
def test_streamed_tool_calls(servers: Servers, responses: bool) -> None:
    chat = model(servers.text, TEXT, use_responses_api=responses).bind_tools([weather])
    calls = [call("weather", json.dumps({"city": city})) for city in ("Köln", "Malmö")]
    total = AIMessageChunk("")
    for chunk in chat.stream(ask("\n".join(calls))):
        total += chunk
    assert [made["args"]["city"] for made in total.tool_calls] == ["Köln", "Malmö"]
    assert total.invalid_tool_calls == []


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(servers: Servers, method: str) -> None:
    chat = model(servers.embedded, EMBEDDED, temperature=0, max_tokens=200)
    assert isinstance(chat.with_structured_output(Animal, method=method).invoke("A fox?"), Animal)


async def test_structured_output_of_responses(servers: Servers) -> None:
    chat = model(servers.embedded, EMBEDDED, temperature=0, use_responses_api=True)
    assert isinstance(await chat.with_structured_output(Animal).ainvoke("A fox?"), Animal)


@APIS
def test_a_prompt_that_is_too_long(servers: Servers, responses: bool) -> None:
    with pytest.raises(ContextOverflowError):
        model(servers.text, TEXT, use_responses_api=responses).invoke("fox " * 9000)
