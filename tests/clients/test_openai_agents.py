"""OpenAI's Agents SDK: an agent that uses a tool, over Responses and Chat Completions."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from clients.servers import EMBEDDED, TEXT, Servers
from support.scripted.asked_text import ask, call

agents = pytest.importorskip("agents", reason="client libraries need make clients")

APIS = pytest.mark.parametrize("api", ["chat", "responses"])


class Animal(BaseModel, extra="forbid"):
    """An animal."""

    size: Literal["small", "large"]
    legs: Literal[2, 4]


def model(url: str, name: str, api: str) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    return kinds[api](model=name, openai_client=client)


# The model of `servers.text` supports no grammar, which a strict tool needs.
@agents.function_tool(strict_mode=False)
def weather(city: str) -> str:
    """The weather in a city."""
    return ask(f"It is sunny in {city}.")


@APIS
async def test_an_agent_uses_a_tool(servers: Servers, api: str) -> None:
    agent = agents.Agent(
        name="helper",
        instructions="Use your tools.",
        model=model(servers.text, TEXT, api),
        tools=[weather],
    )
    asked = ask(f"<think>\nI look.\n</think>\n{call('weather', json.dumps({'city': 'Köln'}))}")
    result = await agents.Runner.run(agent, asked)
    assert result.final_output == "It is sunny in Köln."
    streamed = agents.Runner.run_streamed(agent, asked)
    kinds = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == "It is sunny in Köln."
    assert kinds.count("raw_response_event") > 10


@APIS
async def test_an_answer_is_an_object(servers: Servers, api: str) -> None:
    agent = agents.Agent(
        name="helper",
        model=model(servers.embedded, EMBEDDED, api),
        model_settings=agents.ModelSettings(max_tokens=200),
        output_type=Animal,
    )
    result = await agents.Runner.run(agent, "A fox?")
    assert isinstance(result.final_output, Animal)


@APIS
async def test_a_strict_tool_gets_arguments_of_its_schema(servers: Servers, api: str) -> None:
    given = []

    @agents.function_tool
    def note(size: Literal["small", "large"], legs: Literal[2, 4]) -> str:
        """Notes an animal."""
        given.append((size, legs))
        return "done"

    agent = agents.Agent(
        name="helper",
        model=model(servers.embedded, EMBEDDED, api),
        model_settings=agents.ModelSettings(max_tokens=100, tool_choice="required"),
        tools=[note],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await agents.Runner.run(agent, "A fox?")
    assert result.final_output == "done"
    assert given[0][0] in ("small", "large")


@APIS
async def test_an_agent_with_tools_answers_with_an_object(servers: Servers, api: str) -> None:
    @agents.function_tool
    def legs(size: Literal["small", "large"]) -> str:
        """How many legs an animal has."""
        return "4"

    agent = agents.Agent(
        name="helper",
        model=model(servers.embedded, EMBEDDED, api),
        model_settings=agents.ModelSettings(max_tokens=200),
        tools=[legs],
        output_type=Animal,
    )
    result = await agents.Runner.run(agent, "A fox?", max_turns=8)
    assert isinstance(result.final_output, Animal)
