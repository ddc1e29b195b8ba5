"""`thinking_token_budget` with the embedded model, whose chat template makes it reason."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pagewire.models import EMBEDDED_NAME
from support.processes.stack_process import RunningStack, running_stack

TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with running_stack("--chat-template", str(template), "--reasoning-parser", "think") as stack:
        yield stack


def asked(stack: RunningStack, budget: int | None, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)
    extra = {"thinking_token_budget": budget, "return_token_ids": True}
    return client.chat.completions.create(
        model=EMBEDDED_NAME,
        messages=[{"role": "user", "content": "Tell me about a fox."}],
        max_tokens=60,
        seed=1,
        extra_body={**extra, **fields},
    ).choices[0]


def end_of(stack: RunningStack) -> list[int]:
    body = {"prompt": "</think>", "add_special_tokens": False}
    ids: list[int] = httpx.post(f"{stack.url}/tokenize", json=body).json()["tokens"]
    return ids


@pytest.mark.parametrize("budget", [0, 7])
def test_the_reasoning_ends(reasoning: RunningStack, budget: int) -> None:
    choice, end = asked(reasoning, budget, ignore_eos=True), end_of(reasoning)
    assert choice.token_ids[budget : budget + len(end)] == end
    assert bool(getattr(choice.message, "reasoning_content", None)) == (budget > 0)
    assert choice.message.content
    free = asked(reasoning, -1, ignore_eos=True)
    assert free.token_ids[:budget] == choice.token_ids[:budget]
    assert free.message.content is None


def test_an_answer_of_a_form_follows(reasoning: RunningStack) -> None:
    choice = asked(reasoning, 5, structured_outputs={"choice": ["red", "green"]})
    assert choice.message.content in ("red", "green")
    assert choice.finish_reason == "stop"


def test_a_killed_worker_changes_nothing(reasoning: RunningStack) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 200}
    want = asked(reasoning, 100, **fields).token_ids
    client = openai.OpenAI(base_url=f"{reasoning.url}/v1", api_key="x", max_retries=0)
    got: list[int] = []
    killed = False
    for chunk in client.chat.completions.create(
        model=EMBEDDED_NAME,
        messages=[{"role": "user", "content": "Tell me about a fox."}],
        seed=1,
        stream=True,
        extra_body={"thinking_token_budget": 100, "return_token_ids": True, **fields},
    ):
        for each in chunk.choices:
            got += (each.model_extra or {}).get("token_ids") or []
        if len(got) > 50 and not killed:
            killed = True
            [worker] = reasoning.pids("worker")
            os.kill(worker, signal.SIGKILL)
    assert killed
    assert got == want


def test_a_model_that_does_not_reason_has_no_budget(stack: RunningStack) -> None:
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser") as refused:
        asked(stack, 5)
    assert refused.value.param == "thinking_token_budget"
