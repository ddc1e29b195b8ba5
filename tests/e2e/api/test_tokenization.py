"""/tokenize and /detokenize of the whole stack, compared with transformers."""

import os
import signal
import threading
import time
from typing import Any

import httpx

from pagewire.models import EMBEDDED_NAME
from support.processes.stack_process import RunningStack

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🙂"}]


def post(stack: RunningStack, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{stack.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt(stack: RunningStack, reference: tuple[Any, Any]) -> None:
    tokenizer = reference[1]
    for text in ("Hello, who are you?", "Grüße 🙂\n\n\tx", ""):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            found = post(
                stack, "/tokenize", prompt=text, add_special_tokens=special, return_token_strs=True
            )
            assert (found["tokens"], found["count"]) == (ids, len(ids))
            assert (found["token_strs"] or []) == tokenizer.convert_ids_to_tokens(ids)
            assert post(stack, "/detokenize", tokens=ids)["prompt"] == tokenizer.decode(ids)
    models = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert [model["root"] for model in models] == ["embedded"]
    assert found["max_model_len"] == models[0]["max_model_len"]


def test_a_chat(stack: RunningStack, reference: tuple[Any, Any]) -> None:
    tokenizer = reference[1]
    for opens in (True, False):
        expected = tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=opens, return_dict=True
        )["input_ids"]
        found = post(stack, "/tokenize", messages=CHAT, add_generation_prompt=opens)
        assert found["tokens"] == expected
    text = tokenizer.decode(expected)
    assert post(stack, "/detokenize", tokens=expected, model=EMBEDDED_NAME)["prompt"] == text


def test_what_is_refused(stack: RunningStack) -> None:
    refused = httpx.post(f"{stack.url}/detokenize", json={"tokens": [10**6]})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "token id 1000000 is outside" in error["message"]
    assert error["param"] == "tokens"


def test_a_large_text_does_not_hold_up_others(
    stack: RunningStack, reference: tuple[Any, Any]
) -> None:
    """Half a million characters need a second or more; other requests are answered meanwhile."""
    text = "the quick brown fox " * 30_000
    found: dict[str, Any] = {}

    def tokenize() -> None:
        found.update(post(stack, "/tokenize", prompt=text))

    thread = threading.Thread(target=tokenize)
    thread.start()
    slowest = 0.0
    while thread.is_alive():
        began = time.monotonic()
        assert httpx.get(f"{stack.url}/health").status_code == 200
        slowest = max(slowest, time.monotonic() - began)
    thread.join()
    assert found["count"] == len(reference[1].encode(text))
    assert slowest < 1.0, "the machine is shared and may pause"


def test_a_killed_scheduler_is_not_seen(stack: RunningStack) -> None:
    before = post(stack, "/tokenize", prompt="Hello")
    [scheduler] = stack.pids("scheduler")
    os.kill(scheduler, signal.SIGKILL)
    assert post(stack, "/tokenize", prompt="Hello") == before
