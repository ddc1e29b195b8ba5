"""The output of `pagewire run` when everything is ready: commands that work when copied."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pagewire.auth.keys import KEYS_VARIABLE
from pagewire.cli.client import KEY_VARIABLE
from pagewire.cli.launch.stack import ModelServices, Stack
from pagewire.cli.launch.supervisor import Service
from pagewire.rpc.credentials import SCHEDULER_TOKEN, read_token

_TIMEOUT = 5.0

Use = Literal["chat", "completion", "embedding", "score"]


async def use_of_model(model: ModelServices) -> Use:
    """The use of a model, as its scheduler reports it."""
    import grpc  # not earlier: `cli.commands.services` has the reason

    from pagewire.rpc.transport import open_channel
    from pagewire.v1 import inference_pb2 as pb
    from pagewire.v1 import inference_pb2_grpc

    token = _token(model.scheduler, model.values)
    credentials = model.scheduler.credentials.with_token(token)
    async with open_channel(model.grpc_address, credentials) as channel:
        try:
            answer = await inference_pb2_grpc.InferenceStub(channel).ListModels(
                pb.ListModelsRequest(), timeout=_TIMEOUT, metadata=credentials.metadata
            )
        except grpc.aio.AioRpcError:
            return "chat"  # only the example depends on it
    [served] = answer.models or [pb.Model(has_chat_template=True)]
    if served.task:
        return "embedding" if served.task == pb.POOLING_TASK_EMBED else "score"
    return "chat" if served.has_chat_template else "completion"


def ready_block(stack: Stack, seconds: float, values: Mapping[str, Any], use: Use) -> str:
    """The lines with the server's address, and an example for its first model, which is for
    `use`."""
    first = stack.models[0]
    names = ", ".join(model.name for model in stack.models)
    ids_only = bool(first.values["skip_tokenizer"])
    lines = [
        "",
        f"  Pagewire is ready: {names} at {stack.url} (started in {seconds:.1f} s)",
        "",
        "  Try it:",
    ]
    has_keys = bool(values["api_keys_file"] or os.environ.get(KEYS_VARIABLE, "").strip())
    if has_keys:
        lines.append(f"    export {KEY_VARIABLE}=...    # one of your API keys")
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_keys else ""
    path, body = _example(first.name, use, ids_only)
    url = f"{stack.url}{path}"
    lines.append(f"    curl -N {url}{header} -H 'Content-Type: application/json' \\")
    lines.append(f"      -d '{json.dumps(body)}'")
    generates = use in ("chat", "completion")
    if generates and not ids_only:
        command = "chat" if use == "chat" else 'generate "Once upon a time"'
        which = f" --model {first.name}" if len(stack.models) > 1 else ""
        lines.append(f"    {program()} {command} --url {stack.url}{which}")
    if values["page"]:
        shown = "chat, and the engine live" if generates else "the engine live"
        lines.append(f"    {stack.url}/    in a browser: {shown}")
    lines += ["", f"  gRPC: {_grpc_addresses(stack)}    Ctrl-C ends everything.", ""]
    return "\n".join(lines)


def _grpc_addresses(stack: Stack) -> str:
    """The addresses of the schedulers, with their models if there are several."""
    if len(stack.models) == 1:
        return stack.grpc_address
    return ", ".join(f"{model.grpc_address} ({model.name})" for model in stack.models)


def program() -> str:
    """The `pagewire` command of this environment: only its name if it is on the shell's path."""
    beside = Path(sys.executable).with_name("pagewire")
    found = shutil.which("pagewire")
    if found is not None and Path(found).absolute() == beside.absolute():
        return "pagewire"
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m pagewire.cli.main"
    if beside.is_relative_to(Path.cwd()):
        return shlex.quote(str(beside.relative_to(Path.cwd())))
    return shlex.quote(str(beside))


def _example(model: str, use: Use, ids_only: bool) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request that this model can answer."""
    if use == "embedding":
        text: Any = [1, 2, 3] if ids_only else "Once upon a time"
        return "/v1/embeddings", {"model": model, "input": text}
    if use == "score":
        documents = ["A small wild animal.", "A kind of bread."]
        query = {"query": "What is a fox?", "documents": documents}
        return "/v1/rerank", {"model": model, **query}
    if ids_only:
        asked = {"prompt": [1, 2, 3], "max_tokens": 16, "return_token_ids": True}
        return "/v1/completions", {"model": model, **asked}
    if use == "completion":
        asked = {"prompt": "Once upon a time", "max_tokens": 64, "stream": True}
        return "/v1/completions", {"model": model, **asked}
    messages = [{"role": "user", "content": "Hello! What can you do?"}]
    return "/v1/chat/completions", {"model": model, "messages": messages, "stream": True}


def _token(scheduler: Service, values: Mapping[str, Any]) -> str | None:
    """The token that the scheduler requires from its gateways."""
    given = scheduler.environment.get(SCHEDULER_TOKEN)
    try:
        return given or read_token(values["scheduler_token_file"], SCHEDULER_TOKEN)
    except (OSError, ValueError):
        return None
