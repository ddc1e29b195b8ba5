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


class Clients:
    """Streams over HTTP and gRPC, one after the other for each client, until they are stopped."""

    def __init__(self, stack: ComposeStack) -> None:
        self._stack = stack
        self._stopped = False
        self.answers: list[str] = []
        self.failures: list[str] = []

    async def run(self, http: int, over_grpc: int) -> None:
        """Returns when the last stream of each client has ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(http + over_grpc):
                group.create_task(self._repeat(over_http=number < http))

    async def _repeat(self, over_http: bool) -> None:
        while not self._stopped:
            try:
                if over_http:
                    self.answers.append((await chat(self._stack)).text)
                else:
                    self.answers.append(await generate(self._stack))
            except Exception as error:
                self.failures.append(f"{'HTTP' if over_http else 'gRPC'}: {error!r}")

    async def some_more(self) -> None:
        """Waits until further streams have ended."""
        count = len(self.answers) + 8
        async with asyncio.timeout(120):
            while len(self.answers) < count and not self.failures:
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        self._stopped = True


async def until_shares(stack: ComposeStack, *want: int) -> None:
    """Waits until the schedulers use this many workers each, in ascending order, 120 s at most."""
    have: list[int] = []
    async with asyncio.timeout(120):
        while tuple(have) != want:
            await asyncio.sleep(0.5)
            names = stack.containers("scheduler")
            have = sorted([await asyncio.to_thread(ready_workers, name) for name in names])


def ready_workers(container: str) -> int:
    """The number of workers that a scheduler uses, by its metrics; -1 if it does not answer."""
    code = (
        "from urllib.request import urlopen;"
        "lines = urlopen('http://127.0.0.1:9100/metrics').read().decode().splitlines();"
        "print(*[line.split()[1] for line in lines"
        " if line.startswith('pagewire_scheduler_ready_workers ')])"
    )
    command = ["docker", "exec", container, "python", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(float(done.stdout)) if done.returncode == 0 else -1


async def test_services_scale_up_and_down_under_load(stack: ComposeStack) -> None:
    """No stream fails, and each has the answer of an undisturbed stream."""
    before = (await chat(stack)).text
    clients = Clients(stack)
    running = asyncio.create_task(clients.run(http=4, over_grpc=1))
    try:
        await clients.some_more()
        await asyncio.to_thread(stack.scale, gateway=3, scheduler=2, worker=4)
        await until_shares(stack, 2, 2)
        await clients.some_more()

        # The other scheduler takes over the workers of a dead one until it runs again.
        killed = stack.containers("scheduler")[0]
        clients_of_the_dead = len(clients.failures)
        stack.docker("kill", killed)
        await until_shares(stack, 4)
        await clients.some_more()
        await asyncio.to_thread(stack.docker, "start", killed)
        await until_shares(stack, 2, 2)
        await clients.some_more()
        # A gRPC client has no gateway to continue its stream elsewhere.
        lost = clients.failures[clients_of_the_dead:]
        assert all(failure.startswith("gRPC") for failure in lost), lost
        assert len(lost) <= 1, lost
        del clients.failures[clients_of_the_dead:]

        await asyncio.to_thread(stack.scale, gateway=1, scheduler=1, worker=1)
        await until_shares(stack, 1)
        await clients.some_more()
    finally:
        clients.stop()
        await running
    assert clients.failures == []
    assert set(clients.answers) == {before}
    sizes = {name: len(stack.containers(name)) for name in ("gateway", "scheduler", "worker")}
    assert sizes == {"gateway": 1, "scheduler": 1, "worker": 1}
    print(f"{len(clients.answers)} streams, 0 failed")


async def test_envoy_ends_open_streams_before_it_stops(stack: ComposeStack) -> None:
    asking = asyncio.create_task(chat(stack))
    over_grpc = asyncio.create_task(generate(stack))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(stack.run, "stop", "envoy")
    assert (await asking).text == await over_grpc
    await asyncio.to_thread(stack.run, "start", "envoy")
    await until_ready(stack)


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
