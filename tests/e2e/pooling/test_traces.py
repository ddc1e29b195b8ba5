"""The trace of a request without output: a prefill and no decode."""

from pathlib import Path

import httpx

from support.models.pooling_models import save_embedder
from support.processes.otlp_receiver import otlp_receiver
from support.processes.stack_process import running_stack
from support.waiting import until

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319d", "b7ad6b7169203331"
NAMES = ["POST /v1/embeddings", "prefill", "queue", "scheduler", "worker"]


def test_an_embedding_is_one_trace(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with otlp_receiver() as receiver:
        endpoint = f"--otlp-endpoint={receiver.endpoint}"
        with running_stack(endpoint, "--torch-threads=1", model=tmp_path) as stack:
            headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
            body = {"input": [5] * 20}
            answer = httpx.post(f"{stack.url}/v1/embeddings", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            until(lambda: len(receiver.trace(TRACE)) == len(NAMES), 20)
        spans = {span.name: span for span in receiver.trace(TRACE)}
    assert sorted(spans) == NAMES
    gateway, scheduler = spans[NAMES[0]], spans["scheduler"]
    assert (gateway.parent, scheduler.parent) == (CLIENT, gateway.id)
    assert {spans[name].parent for name in ("queue", "prefill", "worker")} == {scheduler.id}
    assert scheduler.attributes["gen_ai.usage.input_tokens"] == 20
    assert scheduler.attributes["gen_ai.usage.output_tokens"] == 0
    assert scheduler.attributes["pagewire.outcome"] == "completed"
    assert spans["prefill"].attributes["pagewire.tokens"] == 20
