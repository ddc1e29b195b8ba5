"""The worker as a process: readiness, streams, fencing, faults of the protocol, its end."""

import asyncio
import json
import random
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transformers import PreTrainedModel

from pagewire.cli.launch.ports import free_port
from pagewire.packing import pack, unpack
from pagewire.rpc.checksums import RUN, ChecksumWriter, open_stream
from pagewire.rpc.protocol import PROTOCOL_VERSION
from pagewire.rpc.transport import open_channel
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.service import SERVICE_NAME
from support.models.step_driver import Sequence, StepDriver
from support.models.tiny_models import VOCAB, greedy_tokens, save_model, served_bytes
from support.processes.worker_process import (
    SERVING,
    GrpcStream,
    WorkerProcess,
    channel_to,
    serving_worker,
    worker_process,
)
from support.waiting import eventually


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, metrics_port: int
) -> Iterator[tuple[WorkerProcess, PreTrainedModel]]:
    """One worker for all tests that leave it running, and its model. Epochs only grow."""
    folder = tmp_path_factory.mktemp("worker")
    model = save_model(folder / "tiny", "llama-rope3")
    with worker_process(folder, folder / "tiny", worker_metrics_port=metrics_port) as worker:
        yield worker, model


Shared = tuple[WorkerProcess, PreTrainedModel]


def prompts() -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(VOCAB) for _ in range(n)] for n in (2, 17, 40)]


def one_token(step: int, slot: int, block: int) -> pb.Step:
    """A step that starts a sequence and samples its first token."""
    start = pb.SequenceStart(
        slot=slot,
        token_ids=pack([5, 6]),
        blocks=pack([block]),
        sampling=pb.SlotSampling(top_p=1.0),
    )
    return pb.Step(step=step, starts=[start], prefill_slots=pack([slot]), prefill_counts=pack([2]))


async def open_refused(
    channel: grpc.aio.Channel, epoch: int, version: int = PROTOCOL_VERSION
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await GrpcStream.open(channel, epoch, version)
    return error.value.code(), error.value.details() or ""


async def test_generates_over_grpc_what_transformers_generates(
    shared: Shared, metrics_port: int
) -> None:
    worker, model = shared
    expected = [greedy_tokens(model, prompt, 24) for prompt in prompts()]
    async with channel_to(worker) as channel:
        stream = await GrpcStream.open(channel, 1)
        info = stream.ready
        assert info.instance_id
        assert info.weight_bytes == served_bytes(model)
        assert info.kv_cache_bytes == 128 * 2 * 3 * 2 * 16 * 16 * 4
        fields = (info.model, info.block_size, info.num_blocks, info.num_slots, info.vocab_size)
        assert fields == ("tiny", 16, 128, 16, VOCAB)
        assert (info.max_model_len, info.max_num_batched_tokens) == (512, 2048)
        assert (info.dtype, info.device) == ("float32", "cpu")

        driver = StepDriver(stream, info)
        outputs = await driver.run([Sequence(p, 24) for p in prompts()], chunk=11, run_ahead=3)
        assert outputs == expected

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
                return str(page.read(), "utf-8")

        metrics = await asyncio.to_thread(scrape)
        assert f'pagewire_worker_tokens_total{{phase="decode"}} {float(3 * 23)}' in metrics
        assert f'pagewire_worker_tokens_total{{phase="prefill"}} {float(59)}' in metrics
        assert f"pagewire_worker_steps_total {float(driver.number)}" in metrics
        assert f"pagewire_worker_weight_bytes {float(served_bytes(model))}" in metrics
        assert "pagewire_worker_step_seconds_bucket" in metrics

        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        services = (await reflected.read()).list_services_response.service
        assert "pagewire.v1.Worker" in {service.name for service in services}
        assert await worker.health(channel, "pagewire.v1.Worker") == SERVING
        assert worker.log.count(f"ready on {worker.address}: tiny, float32 on cpu") == 1


async def test_newer_epoch_takes_over_and_older_ones_are_refused(shared: Shared) -> None:
    async with channel_to(shared[0]) as channel:
        first = await GrpcStream.open(channel, 100)
        await first.send(one_token(1, slot=3, block=9))
        token = (await first.receive()).token_ids
        for epoch in (99, 100):
            code, details = await open_refused(channel, epoch)
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert f"epoch {epoch} is not newer than 100" in details
        await first.send(pb.Step(step=2, decode_slots=pack([3])))
        assert len((await first.receive()).token_ids) == 4

        second = await GrpcStream.open(channel, 101)
        code, details = await first.status()
        assert code == grpc.StatusCode.ABORTED
        assert "101" in details
        # Slots are reset, and steps are counted from 1.
        await second.send(pb.Step(step=1, decode_slots=pack([3])))
        result = await second.receive()
        assert unpack(result.token_ids).tolist() == [-1]
        assert "slot 3 holds no sequence" in result.errors[0].message
        await second.send(one_token(2, slot=0, block=9))
        assert unpack((await second.receive()).token_ids).tolist() == [-1, *unpack(token)]

        # A scheduler that leaves releases the worker, but its epoch stays used.
        await second.call.done_writing()
        assert (await second.status())[0] == grpc.StatusCode.OK
        assert (await open_refused(channel, 101))[0] == grpc.StatusCode.FAILED_PRECONDITION
        third = await GrpcStream.open(channel, 102)
        third.call.cancel()
        fourth = await GrpcStream.open(channel, 103)
        await fourth.send(one_token(1, slot=0, block=9))
        assert (await fourth.receive()).token_ids == token


async def test_faults_of_the_protocol(shared: Shared) -> None:
    async with channel_to(shared[0]) as channel:
        code, details = await open_refused(channel, 1, version=PROTOCOL_VERSION - 1)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert f"this worker speaks {PROTOCOL_VERSION}" in details

        async def broken(epoch: int, *requests: pb.RunRequest) -> tuple[grpc.StatusCode, str]:
            call = open_stream(channel, RUN)
            if epoch:
                hello = pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=epoch)
                requests = (pb.RunRequest(hello=hello), *requests)
            for request in requests:
                await call.write(request)
            return await GrpcStream(call, pb.WorkerInfo()).status()

        def step(**fields: object) -> pb.RunRequest:
            return pb.RunRequest(step=pb.Step(**fields))

        hello = pb.RunRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=9))
        faults = [
            (0, [step(step=1)], "first message of a stream must be hello"),
            (0, [pb.RunRequest()], "first message of a stream must be hello"),
            (1010, [hello], "every message after the first must be a step"),
            (1011, [pb.RunRequest()], "every message after the first must be a step"),
            (1012, [step(step=2)], "step 2 came where step 1 was due"),
            (1013, [step(step=1), step(step=1)], "step 1 came where step 2 was due"),
            (1014, [step(step=1, prefill_slots=b"\x00")], "prefill_slots has 1 bytes"),
            (1015, [step(step=1, decode_slots=pack([16]))], "slot 16"),
        ]
        for epoch, requests, words in faults:
            code, details = await broken(epoch, *requests)
            assert code == grpc.StatusCode.INVALID_ARGUMENT, words
            assert words in details

        stream = await GrpcStream.open(channel, 1020)
        await stream.send(one_token(1, slot=0, block=1))
        assert unpack((await stream.receive()).token_ids)[0] >= 0


async def test_not_serving_until_loaded(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    # Large enough that creating its weights lasts longer than the first answers.
    config |= {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with worker_process(tmp_path, tmp_path, load_format="dummy", num_blocks=40) as worker:
        await worker.until_listening()
        async with open_channel(worker.address) as channel:
            assert await worker.health(channel) != SERVING
            assert await worker.health(channel, "pagewire.v1.Worker") != SERVING
            code, details = await open_refused(channel, 1)
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "loading" in details
            await worker.until_serving(channel)
            await GrpcStream.open(channel, 1)


async def test_sigterm_ends_an_idle_worker_with_status_0(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    async with serving_worker(tmp_path, tmp_path / "tiny") as (worker, _):
        worker.terminate()
        assert await worker.exit_status() == 0


async def test_sigterm_lets_the_open_stream_finish(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    async with serving_worker(tmp_path, tmp_path / "tiny") as (worker, channel):
        stream = await GrpcStream.open(channel, 1)
        await stream.send(one_token(1, slot=0, block=1))
        await stream.receive()
        worker.terminate()
        while await worker.health(channel) == SERVING:
            await asyncio.sleep(0.02)
        assert (await open_refused(channel, 2))[0] == grpc.StatusCode.UNAVAILABLE
        await stream.send(pb.Step(step=2, decode_slots=pack([0])))
        assert unpack((await stream.receive()).token_ids)[0] >= 0
        await stream.call.done_writing()
        assert (await stream.status())[0] == grpc.StatusCode.OK
        assert await worker.exit_status() == 0


async def test_drain_timeout_ends_a_stream_that_stays(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    async with serving_worker(tmp_path, tmp_path / "tiny", drain_timeout=0.2) as (worker, channel):
        stream = await GrpcStream.open(channel, 1)
        worker.terminate()
        assert (await stream.status())[0] != grpc.StatusCode.OK
        assert await worker.exit_status() == 0
        assert "still open after 0.2 s" in worker.log


# The thread that loads is inside torch when the process gets a signal to end.
_LOADS_FOR_EVER = """
import sys
import torch
from pagewire.worker.startup import loading

def load(*_):
    print("loading", file=sys.stderr, flush=True)
    while True:
        torch.ones(256, 256) @ torch.ones(256, 256)

loading.load_worker = load
"""


async def test_sigterm_while_the_model_is_loading_ends_the_process_cleanly(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    with worker_process(tmp_path, tmp_path / "tiny", _LOADS_FOR_EVER) as worker:
        await eventually(lambda: "loading" in worker.log, 60)
        worker.terminate()
        assert await worker.exit_status() == 0
        assert "stopped before it was ready" in worker.log
        assert "terminate called" not in worker.log


async def test_failure_to_load_ends_the_process_with_one_line(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    with worker_process(tmp_path, tmp_path / "tiny") as worker:
        assert await worker.exit_status() == 1
        assert "cannot start: " in worker.log
        assert "has neither model.safetensors" in worker.log
        assert "Traceback" not in worker.log


# Loads until a client watches the worker's health, then fails.
_FAILS_WHEN_TOLD = """
import pathlib, time
from pagewire.worker.startup import loading

def load(*_):
    while not pathlib.Path(TOLD).exists():
        time.sleep(0.01)
    raise OSError("the model is broken")

loading.load_worker = load
"""


async def test_failure_to_start_is_one_line_also_while_health_is_watched(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    told = tmp_path / "told"
    prologue = _FAILS_WHEN_TOLD.replace("TOLD", repr(str(told)))
    with worker_process(tmp_path, tmp_path / "tiny", prologue) as worker:
        await worker.until_listening()
        async with open_channel(worker.address) as channel:
            watched = [
                health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(service=name)
                )
                for name in ("", SERVICE_NAME) * 32
            ]
            for call in watched:
                assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            told.touch()
            assert await worker.exit_status() == 1
    assert "cannot start: the model is broken" in worker.log
    assert "Traceback" not in worker.log
    assert len(worker.log.strip().splitlines()) == 1, worker.log


async def test_failure_to_find_the_tokenizer_ends_the_process_with_one_line(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    absent = str(tmp_path / "absent")
    with worker_process(tmp_path, tmp_path / "tiny", tokenizer=absent) as worker:
        assert await worker.exit_status() == 1
        assert f"cannot start: model '{absent}': no folder" in worker.log
        assert "Traceback" not in worker.log


async def test_address_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with worker_process(tmp_path, tmp_path / "tiny", worker_address=address) as worker:
            assert await worker.exit_status() == 1
            assert f"cannot listen on {address}" in worker.log
            assert "Traceback" not in worker.log


async def test_a_message_that_does_not_decode_ends_its_stream(shared: Shared) -> None:
    hello = pb.RunRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=100_000))
    async with channel_to(shared[0]) as channel:
        for sent in ([b"\xff"], [hello.SerializeToString(), b"\xff"]):
            call = channel.stream_stream("/pagewire.v1.Worker/Run")(timeout=20)
            writer = ChecksumWriter(bytes)
            for data in sent:
                await call.write(writer.serialize(data))
            code, _ = await GrpcStream(call, pb.WorkerInfo()).status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        stream = await GrpcStream.open(channel, 100_001)
        await stream.send(one_token(1, slot=3, block=9))
        assert len((await stream.receive()).token_ids) == 4
        stream.call.cancel()
