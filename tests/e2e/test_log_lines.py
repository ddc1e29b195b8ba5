"""Log lines of real processes: a clean stop, one line a request, throughput under load."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.processes.stack_process import RunningStack, running_stack
from support.waiting import until

COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """The lines of a stack that served some requests, was idle, and was stopped."""
    with running_stack("--log-format", "json") as stack:
        headers = {"x-request-id": "mine-1"}
        with httpx.Client(base_url=stack.url, timeout=60, headers=headers) as client:
            body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}
            assert client.post(COMPLETION, json=body).status_code == 200
            assert client.post(COMPLETION, json={"prompt": ""}).status_code == 400
            assert client.get("/nowhere%0A").status_code == 404
        until(lambda: any("output tokens/s" in line for line in stack.log), 30)
        time.sleep(11)
    return [json.loads(line) for line in stack.log]


def test_a_clean_stop_logs_nothing_above_info(lines: list[dict[str, Any]]) -> None:
    assert {line["service"] for line in lines} >= {"gateway", "scheduler", "worker"}
    assert [line for line in lines if line["level"] not in ("debug", "info")] == []
    assert any(line["message"] == "stopped" for line in lines)


def test_each_request_has_one_line(lines: list[dict[str, Any]]) -> None:
    found = [line for line in lines if line["logger"].endswith("gateway.http.request_log")]
    assert [(line["path"], line["outcome"]) for line in found] == [
        (COMPLETION, 200),
        (COMPLETION, 400),
        (r"/nowhere\n", 404),
    ]
    served = found[0]
    assert served["method"] == "POST"
    assert served["request_id"] == "mine-1"
    assert served["model"] == "pagewire-chat"
    assert (served["prompt_tokens"] > 0, served["tokens"]) == (True, 8)
    assert 0 < served["ttft"] < served["duration"]
    assert (served["resumes"], served["preemptions"]) == (0, 0)
    for field in ("method", "outcome", "tokens", "ttft", "duration", "resumes"):
        assert str(served[field]) in served["message"]


def test_throughput_is_logged_once_and_not_while_idle(lines: list[dict[str, Any]]) -> None:
    [found] = [line for line in lines if line["logger"] == "pagewire.scheduler.reports.throughput"]
    assert found["output_tokens_per_second"] > 0
    assert found["prompt_tokens_per_second"] > 0


@pytest.fixture
def killed(stack: RunningStack) -> Iterator[str]:
    """The id of a request whose worker was killed while it ran."""
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "survivor"}
    with httpx.stream(
        "POST", f"{stack.url}{COMPLETION}", json=body, headers=headers, timeout=90
    ) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 20:
                stack.kill_worker()
    yield "survivor"
    until(lambda: any("worker-0 is ready again" in line for line in stack.log), 60)


def test_the_line_of_a_request_that_survived_a_kill(stack: RunningStack, killed: str) -> None:
    def own() -> list[str]:
        return [line for line in stack.log if f"request_id={killed}" in line]

    until(lambda: bool(own()), 10)
    [line] = own()
    assert " 200 " in line
    assert re.search(r"\btokens=300\b", line), line
    assert re.search(r"\bresumes=1\b", line), line
