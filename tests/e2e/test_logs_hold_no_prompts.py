"""Logs hold no prompt, output or key, also when a request fails."""

from typing import Any

import grpc
import httpx

from pagewire.auth.keys import new_key
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import running_stack

MARK = "zanzibar-marker"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def bodies() -> list[tuple[str, dict[str, Any]]]:
    turn = {"role": "user", "content": MARK}
    return [
        (CHAT, {"messages": [turn], "max_tokens": 4}),
        (CHAT, {"messages": [turn], "max_tokens": 4, "stream": True}),
        (CHAT, {"messages": [turn, turn], "max_tokens": 10**6}),
        (CHAT, {"messages": [turn], "chat_template_kwargs": {"messages": MARK}}),
        (CHAT, {"messages": [{"role": MARK, "content": MARK}]}),
        (CHAT, {"messages": [turn], MARK: MARK}),
        (COMPLETION, {"prompt": MARK, "max_tokens": 4, "stop": [MARK]}),
        (COMPLETION, {"prompt": [MARK, ""]}),
        (COMPLETION, {"prompt": MARK, "temperature": MARK}),
        (COMPLETION, {"prompt": MARK, "model": MARK}),
        (COMPLETION, {"prompt": MARK, "user": MARK, "metadata": {"a": MARK}, "max_tokens": 1}),
    ]


def test_logs_hold_no_prompt_and_no_key(monkeypatch: Any) -> None:
    key = new_key()
    monkeypatch.setenv("PAGEWIRE_API_KEYS", f"ada={key}")
    with running_stack("--log-level", "debug") as stack:
        headers = {"authorization": f"Bearer {key}"}
        statuses = set()
        with httpx.Client(base_url=stack.url, headers=headers, timeout=60) as client:
            for path, body in bodies():
                statuses.add(client.post(path, json=body).status_code)
            statuses.add(client.post(CHAT, content=f'{{"messages": "{MARK}').status_code)
            client.headers["authorization"] = f"Bearer {MARK}{MARK}"
            statuses.add(client.get("/v1/models").status_code)
        with grpc.insecure_channel(stack.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            shown = (("authorization", f"Bearer {key}"),)
            for request in (
                pb.GenerateRequest(prompt=MARK, stop=pb.StopConditions(max_tokens=2)),
                pb.GenerateRequest(prompt=MARK, model=MARK),
                pb.GenerateRequest(prompt=MARK, request_id=f"x\n{MARK}"),
            ):
                try:
                    statuses.add(len([*stub.Generate(request, metadata=shown, timeout=60)]) > 0)
                except grpc.RpcError as error:
                    statuses.add(error.code())
            stub.Tokenize(pb.TokenizeRequest(text=MARK), metadata=shown)
    assert {200, 400, 401, 404, True, grpc.StatusCode.NOT_FOUND} <= statuses
    assert grpc.StatusCode.INVALID_ARGUMENT in statuses
    log = "".join(stack.log)
    assert "POST /v1/chat/completions 200" in log
    assert " D gateway " in log, "debug messages are shown"
    assert MARK not in log
    assert key not in log
