"""LlamaIndex with its OpenAI-like model."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from clients.servers import EMBEDDED, TEXT, Servers
from support.scripted.asked_text import ask, call

like = pytest.importorskip(
    "llama_index.llms.openai_like", reason="client libraries need make clients"
)
from llama_index.core.agent.workflow import FunctionAgent  # noqa: E402
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.prompts import PromptTemplate  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402


class Animal(BaseModel, extra="forbid"):
    """An animal."""

    size: Literal["small", "large"]
    legs: Literal[2, 4]


def weather(city: str) -> str:
    """The weather in a city."""
    return ask(f"It is sunny in {city}.")


TOOL = FunctionTool.from_defaults(weather)
ASKED = ask(call("weather", json.dumps({"city": "Köln"})))


def model(url: str, name: str, **fields: Any) -> Any:
    return like.OpenAILike(
        model=name,
        api_base=f"{url}/v1",
        api_key="x",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_retries=0,
        **fields,
    )


def test_a_text_and_its_stream(servers: Servers) -> None:
    llm = model(servers.text, TEXT)
    message = ChatMessage(role="user", content=ask("Grüße 🙂 to you"))
    assert llm.chat([message]).message.content == "Grüße 🙂 to you"
    pieces = [piece.delta for piece in llm.stream_chat([message])]
    assert "".join(filter(None, pieces)) == "Grüße 🙂 to you"
    assert llm.complete(ask("Yes.")).text == "Yes."


def test_function_calling(servers: Servers) -> None:
    llm = model(servers.text, TEXT)
    answer = llm.chat_with_tools([TOOL], user_msg=ASKED)
    [made] = llm.get_tool_calls_from_response(answer)
    assert (made.tool_name, made.tool_kwargs) == ("weather", {"city": "Köln"})
    *_, last = llm.stream_chat_with_tools([TOOL], user_msg=ASKED)
    [made] = llm.get_tool_calls_from_response(last)
    assert (made.tool_name, made.tool_kwargs) == ("weather", {"city": "Köln"})


async def test_an_agent_uses_a_tool(servers: Servers) -> None:
    agent = FunctionAgent(tools=[TOOL], llm=model(servers.text, TEXT), system_prompt="Use them.")
    assert str(await agent.run(ASKED)) == "It is sunny in Köln."


def test_an_answer_is_an_object(servers: Servers) -> None:
    llm = model(servers.embedded, EMBEDDED, max_tokens=200)
    assert isinstance(llm.structured_predict(Animal, PromptTemplate("A fox?")), Animal)
