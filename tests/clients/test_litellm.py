"""LiteLLM, with its providers for such servers."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from clients.servers import EMBEDDED, TEXT, Servers
from support.scripted.asked_text import ask, call

litellm = pytest.importorskip("litellm", reason="client libraries need make clients")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])


class Animal(BaseModel, extra="forbid"):
    """An animal."""

    size: Literal["small", "large"]
    legs: Literal[2, 4]


def asked(url: str, model: str, text: str, **fields: Any) -> dict[str, Any]:
    base = url if model.startswith("anthropic/") else f"{url}/v1"
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "api_base": base,
        "api_key": "x",
        "num_retries": 0,
        "max_tokens": 200,
        **fields,
    }


@PROVIDERS
def test_a_text_and_its_stream(servers: Servers, provider: str) -> None:
    request = asked(servers.text, f"{provider}/{TEXT}", ask("Grüße 🙂 to you"))
    answer = litellm.completion(**request)
    assert answer.choices[0].message.content == "Grüße 🙂 to you"
    chunks = list(litellm.completion(**request, stream=True))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(filter(None, pieces)) == "Grüße 🙂 to you"
    assert len(list(filter(None, pieces))) > 3


@PROVIDERS
async def test_tools(servers: Servers, provider: str) -> None:
    text = f"Let me look.\n{call('weather', json.dumps({'city': 'Köln'}))}"
    request = asked(servers.text, f"{provider}/{TEXT}", ask(text), tools=TOOLS)
    answer = await litellm.acompletion(**request)
    [choice] = answer.choices
    [made] = choice.message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == (
        "weather",
        {"city": "Köln"},
    )
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    result = {"role": "tool", "tool_call_id": made.id, "content": ask("It is sunny.")}
    following = [*request["messages"], choice.message.model_dump(), result]
    answer = await litellm.acompletion(**{**request, "messages": following})
    assert answer.choices[0].message.content == "It is sunny."


@PROVIDERS
def test_streamed_tools(servers: Servers, provider: str) -> None:
    text = call("weather", json.dumps({"city": "Köln"}))
    request = asked(servers.text, f"{provider}/{TEXT}", ask(text), tools=TOOLS)
    chunks = list(litellm.completion(**request, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=request["messages"])
    [made] = whole.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Köln"}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_reasoning_stands_apart(servers: Servers, provider: str) -> None:
    text = ask("<think>\nIs it?\n</think>\n\nYes.")
    answer = litellm.completion(**asked(servers.text, f"{provider}/{TEXT}", text))
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Is it?", "Yes.")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_structured_output(servers: Servers, provider: str) -> None:
    request = asked(servers.embedded, f"{provider}/{EMBEDDED}", "A fox?")
    answer = litellm.completion(**request, response_format=Animal)
    assert Animal.model_validate_json(answer.choices[0].message.content)


@PROVIDERS
def test_a_prompt_that_is_too_long(servers: Servers, provider: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(servers.text, f"{provider}/{TEXT}", "fox " * 9000))


def test_responses(servers: Servers) -> None:
    answer = litellm.responses(
        model=f"openai/{TEXT}", input=ask("Yes."), api_base=f"{servers.text}/v1", api_key="x"
    )
    [message] = answer.output
    assert message.content[0].text == "Yes."
