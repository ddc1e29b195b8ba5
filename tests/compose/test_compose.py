"""The compose file: images, requests through Envoy, and requests while services are stopped."""

import asyncio
import subprocess
from collections.abc import Iterator

import grpc
import httpx
import pytest

from compose.stack import ComposeStack, engine
from pagewire.cli.client import Answer, chat_answer, served_models
from pagewire.cli.launch.health import until_healthy
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc as pb_grpc

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

QUESTION = [{"role": "user", "content": "Hello! What can you do?"}]
IMAGES = ("pagewire-gateway", "pagewire-scheduler", "pagewire-worker")


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    with engine() as reason:
        if reason is not None:
            pytest.skip(reason)
        stack = ComposeStack()
        stack.run("build")
        try:
            stack.run("up", "-d")
            stack.wait_healthy(300)
            yield stack
        finally:
            stack.run("down", "--volumes", "--timeout", "5")


async def chat(stack: ComposeStack) -> Answer:
    """A streamed chat completion through Envoy."""
    url = f"http://127.0.0.1:{stack.http_port}"
    models = await served_models(url)
    assert models == ["pagewire-chat"]
    answer = chat_answer(url, models[0], QUESTION, temperature=0, max_tokens=64)
    pieces = [piece async for piece in answer]
    assert len(pieces) > 1
    assert answer.finish_reason in ("stop", "length")
    return answer


async def generate(stack: ComposeStack) -> str:
    """The text of the same answer over gRPC through Envoy."""
    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(**message) for message in QUESTION]),
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=64),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        call = pb_grpc.InferenceStub(channel).Generate(request, timeout=60)
        responses = [response async for response in call]
    assert len(responses) > 1
    assert responses[-1].finish.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    return "".join(response.text for response in responses)


async def test_streams_over_http_and_grpc_agree(stack: ComposeStack) -> None:
    answer = await chat(stack)
    assert answer.text.strip()
    assert await generate(stack) == answer.text


def test_no_service_runs_as_root(stack: ComposeStack) -> None:
    for image in IMAGES:
        assert in_image(image, "import os; print(os.getuid())") != "0"


def test_images_hold_only_what_their_service_needs(stack: ComposeStack) -> None:
    """No torch in the control plane, no tokenizer and no model in the gateway.

    A worker has a tokenizer for the grammars of structured output.
    """
    found = {
        image: in_image(
            image,
            "from importlib.util import find_spec; from pathlib import Path; import pagewire.cli;"
            "root = Path(pagewire.cli.__file__).parents[1];"
            "print(*[n for n in ('torch', 'tokenizers', 'fastapi') if find_spec(n)],"
            "*sorted({p.suffix for p in root.rglob('model/*.safetensors')}))",
        )
        for image in IMAGES
    }
    assert found == {
        "pagewire-gateway": "fastapi",
        "pagewire-scheduler": "tokenizers",
        "pagewire-worker": "torch tokenizers .safetensors",
    }


def in_image(image: str, code: str) -> str:
    """The output of a Python program in a container of an image."""
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python", image]
    done = subprocess.run([*command, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_requests_succeed_without_one_gateway_and_one_scheduler(stack: ComposeStack) -> None:
    before = await chat(stack)
    stack.run("stop", "gateway-0", "scheduler-0")
    # Envoy may still try a stopped service; then it must retry at another within the request.
    for _ in range(6):
        assert (await chat(stack)).text == before.text
        assert await generate(stack) == before.text
    health = stack.health()
    assert {health["gateway-0"], health["scheduler-0"]} == {"stopped"}

    stack.run("start", "scheduler-0", "gateway-0")
    stack.wait_healthy(120)
    stack.run("stop", "gateway-1", "scheduler-1")
    # The restarted services serve alone once Envoy has found them.
    await until_ready(stack)
    assert (await chat(stack)).text == before.text
    assert await generate(stack) == before.text


async def until_ready(stack: ComposeStack) -> None:
    """Waits until both of Envoy's ports reach a healthy service, 30 s at most."""
    for address in (f"http://127.0.0.1:{stack.http_port}/readyz", f"127.0.0.1:{stack.grpc_port}"):
        async with asyncio.timeout(30):
            await until_healthy(address)


async def test_envoy_does_not_expose_its_admin_interface(stack: ComposeStack) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for path in ("/stats", "/config_dump", "/server_info"):
            response = await client.get(f"http://127.0.0.1:{stack.http_port}{path}")
            assert response.status_code == 404
