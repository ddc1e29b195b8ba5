"""Real processes serve exactly the metrics of docs/metrics.md."""

import re

import httpx
import pytest
from tools.metrics_page import described

from pagewire.cli.launch.ports import free_port
from support.processes.stack_process import running_stack


@pytest.fixture(scope="module")
def scraped() -> dict[str, str]:
    """The text of each process's metrics, after one request."""
    ports = {"scheduler": free_port(), "worker": free_port()}
    flags = [f"--{name}-metrics-port={port}" for name, port in ports.items()]
    with running_stack(*flags) as stack:
        body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).raise_for_status()
        found = {"gateway": httpx.get(f"{stack.url}/metrics").text}
        for name, port in ports.items():
            found[name] = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return found


@pytest.mark.parametrize("process", ["gateway", "scheduler", "worker"])
def test_a_process_serves_the_documented_metrics(scraped: dict[str, str], process: str) -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped[process], re.M))
    ours = {n: k for n, k in kinds.items() if not n.startswith(("process_", "python_"))}
    ours = {n: k for n, k in ours.items() if not n.endswith("_created")}
    assert ours == {row.name: row.kind for row in described() if row.process == process}


def test_vllm_names_count_the_request(scraped: dict[str, str]) -> None:
    model = 'model_name="pagewire-chat"'
    assert f"vllm:generation_tokens_total{{{model}}} 4.0" in scraped["scheduler"]
    success = rf'vllm:request_success_total\{{finished_reason="length",{model}\}} 1\.0'
    assert re.search(success, scraped["scheduler"])
    assert f"vllm:time_to_first_token_seconds_count{{{model}}} 1.0" in scraped["gateway"]
