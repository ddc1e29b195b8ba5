"""Random bytes, broken messages and random messages to both gRPC services, as real processes.

Every call must return an answer or a status that names the fault; no log may have a traceback.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message

from pagewire.auth.keys import new_key
from pagewire.errors import Code
from pagewire.packing import pack, pack_floats
from pagewire.rpc.checksums import ChecksumReader, ChecksumWriter, receive
from pagewire.rpc.protocol import PROTOCOL_VERSION
from pagewire.rpc.transport import open_channel
from pagewire.scheduler.requests import failures
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from pagewire.v1 import worker_pb2 as worker_pb
from pagewire.v1.snapshot_pb2 import SnapshotRequest
from support.clients.mutation import fill, mutated_bytes
from support.processes.stack_process import RunningStack, running_stack
from support.processes.worker_process import GrpcStream, WorkerProcess

Inputs = Callable[[str], int]
Tally = Callable[[str], Counter[str]]
Metadata = tuple[tuple[str, str], ...]

LANES = 16
# The client library reports only this if the server refuses a stream while the client writes.
_ENDED_WHILE_WRITING = "Internal error from Core"
INFERENCE, WORKER = "/pagewire.v1.Inference/", "/pagewire.v1.Worker/"


@dataclass(frozen=True)
class Method:
    """A method and valid messages for it."""

    name: str
    request: type[Message]
    seeds: tuple[Message, ...]
    streams: bool = False
    answers: bool = False  # the answer is a stream


CHAT = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hi", name="x")])
CHAT.template_kwargs.update({"a": [1.5, {"b": None}], "c": True})
GENERATE = (
    pb.GenerateRequest(prompt="a", stop=pb.StopConditions(max_tokens=2, stop=["e"])),
    pb.GenerateRequest(
        model="pagewire-chat",
        chat=CHAT,
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            seed=1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            logit_bias={3: 1.5, 200: -100},
        ),
        stop=pb.StopConditions(max_tokens=3),
    ),
    pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[1, 2, 3]),
        resume_token_ids=[4],
        detokenize=False,
        stop=pb.StopConditions(max_tokens=3, stop_token_ids=[7], ignore_eos=True),
    ),
)
POOL = (
    pb.GenerateRequest(
        prompt="a", pooling=pb.PoolingParams(task=pb.POOLING_TASK_EMBED, dimensions=3)
    ),
    pb.GenerateRequest(
        pair=pb.TextPair(query="a", document="b", instruction="c"),
        pooling=pb.PoolingParams(task=pb.POOLING_TASK_SCORE),
    ),
)
METHODS = (
    Method("Generate", pb.GenerateRequest, GENERATE, answers=True),
    Method("Pool", pb.GenerateRequest, POOL),
    Method("Abort", pb.AbortRequest, (pb.AbortRequest(request_id="x"),)),
    Method(
        "Tokenize",
        pb.TokenizeRequest,
        (
            pb.TokenizeRequest(text="Hello", add_special_tokens=True),
            pb.TokenizeRequest(chat=GENERATE[1].chat),
        ),
    ),
    Method("Detokenize", pb.DetokenizeRequest, (pb.DetokenizeRequest(token_ids=[1, 2, 3]),)),
    Method("ListModels", pb.ListModelsRequest, (pb.ListModelsRequest(),)),
    Method("GetLoad", pb.GetLoadRequest, (pb.GetLoadRequest(),)),
    Method("GetSnapshot", SnapshotRequest, (SnapshotRequest(steps_after=3),)),
    Method(
        "Multiplex",
        pb.MultiplexRequest,
        (
            *(
                pb.MultiplexRequest(
                    submit=pb.Submit(stream=number, request=request.SerializeToString())
                )
                for number, request in enumerate(GENERATE)
            ),
            pb.MultiplexRequest(abort=1),
        ),
        streams=True,
        answers=True,
    ),
)
# Weight of each method: methods with more fields are fuzzed more often.
WEIGHTS = (34, 8, 3, 12, 8, 1, 1, 1, 32)


def data_of(rng: random.Random, method: Method) -> bytes:
    """Random bytes, a broken message, or a random message, as bytes."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(64))
    if kind < 0.4:
        return mutated_bytes(rng, rng.choice(method.seeds).SerializeToString())
    message = method.request()
    if kind < 0.5:
        return fill(rng, message).SerializeToString()
    message.CopyFrom(rng.choice(method.seeds))
    return fill(rng, message, rate=rng.choice((0, 0.02, 0.1))).SerializeToString()


def decodable(rng: random.Random, method: Method) -> bytes:
    """Like `data_of`, but the bytes always decode."""
    while not decodes(method, data := data_of(rng, method)):
        pass
    return data


def decodes(method: Method, data: bytes) -> bool:
    try:
        method.request().ParseFromString(data)
    except DecodeError:
        return False
    return True


async def status_of(
    channel: grpc.aio.Channel,
    path: str,
    method: Method,
    sent: list[bytes],
    with_checksums: bool = True,
    metadata: Metadata = (),
) -> str:
    """Calls a method with messages as bytes; returns the name of its status, and details.

    Messages of a stream get checksums if `with_checksums` is set.
    """
    reader = ChecksumReader(method.name, bytes)
    try:
        if method.streams:
            writer = ChecksumWriter(bytes)
            call = channel.stream_stream(path)(timeout=20, metadata=metadata)
            for data in sent:
                await call.write(writer.serialize(data) if with_checksums else data)
            await call.done_writing()
        elif method.answers:
            call = channel.unary_stream(path)(sent[0], timeout=20, metadata=metadata)
        else:
            await channel.unary_unary(path)(sent[0], timeout=20, metadata=metadata)
            return "OK"
        while (data := await call.read()) is not grpc.aio.EOF:
            if method.streams:
                reader.deserialize(data)
            if method.name == "Multiplex":
                _check_ends(data, sent)
        return (await call.code()).name
    except grpc.aio.AioRpcError as error:
        if error.details() == _ENDED_WHILE_WRITING:
            return "ENDED"
        return f"{error.code().name}: {error.details()}"
    except asyncio.InvalidStateError:  # the stream ended while this side was still writing
        return f"{(await call.code()).name}: {await call.details()}"


def _check_ends(data: bytes, sent: list[bytes]) -> None:
    """Requests of a stream end one by one, each with an error that it may have."""
    for ended in pb.MultiplexResponse.FromString(data).finished:
        error = ended.finish.error
        if error.code == Code.UNAVAILABLE:  # another stream uses the scheduler alone
            assert error.message == failures.reserved().message, (error, sent)
            continue
        assert error.code in (0, 3, 4, 5), (error, sent)


def check(method: Method, sent: list[bytes], status: str, with_checksums: bool = True) -> str:
    """The status as it is counted; AssertionError if no caller may get it."""
    code = status.partition(":")[0]
    if method.streams and not with_checksums:
        # Four zeros are the CRC-32 of no bytes. Such a first message is intact but invalid.
        sound = ("INVALID_ARGUMENT",) if sent[0] == bytes(4) else ()
        assert code in ("DATA_LOSS", *sound, *_endings(method)), (method.name, status, sent)
        return f"without checksums {code}"
    if all(decodes(method, data) for data in sent):
        allowed = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED")
        allowed += ("DEADLINE_EXCEEDED",)  # of requests with a deadline
        assert code in allowed + _endings(method), (method.name, status, sent)
        return code
    # An earlier message may be the reason why a stream is refused.
    refused = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", *_endings(method))
    assert code in refused, (method.name, status, sent)
    return f"undecodable {code}"


def _endings(method: Method) -> tuple[str, ...]:
    return ("ENDED",) if method.streams else ()


async def test_inference(stack: RunningStack, inputs: Inputs, tally: Tally) -> None:
    name = "grpc Inference"
    await _fuzz_inference(stack.grpc_address, inputs(name), tally(name), {"": ()})


async def test_inference_with_keys(
    inputs: Inputs, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers have an API key, the token of the services, or an unknown key."""
    fuzzer, key, token = "grpc Inference with keys", new_key(), new_key()
    monkeypatch.setenv("PAGEWIRE_API_KEYS", f"ada={key}")
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_TOKEN", token)
    secrets = {"key": key, "token": token, "unknown": new_key()}
    callers = {name: (("authorization", f"Bearer {secret}"),) for name, secret in secrets.items()}
    with running_stack("--max-model-len", "48", "--log-level", "warning") as stack:
        await _fuzz_inference(stack.grpc_address, inputs(fuzzer), tally(fuzzer), callers)
    assert "Traceback" not in "".join(stack.log), "".join(stack.log)


async def _fuzz_inference(
    address: str, number_of_inputs: int, counts: Counter[str], callers: dict[str, Metadata]
) -> None:
    async def lane(seed: int) -> None:
        rng = random.Random(seed)
        left = number_of_inputs // LANES
        async with open_channel(address) as channel:
            while left > 0:
                method = rng.choices(METHODS, WEIGHTS)[0]
                number = rng.randint(1, 12) if method.streams else 1
                # A message that does not decode ends a stream, so most streams have none.
                make = data_of if rng.random() < 0.3 else decodable
                sent = [make(rng, method) for _ in range(number)]
                left -= number
                caller = rng.choice([*callers])
                path = INFERENCE + method.name
                checked = rng.random() > 0.05
                status = await status_of(channel, path, method, sent, checked, callers[caller])
                code = status.partition(":")[0]
                if caller == "unknown":
                    assert code in ("UNAUTHENTICATED", *_endings(method)), (method.name, status)
                elif caller == "key" and method.name in ("GetLoad", "GetSnapshot", "Multiplex"):
                    assert code in ("PERMISSION_DENIED", *_endings(method)), (method.name, status)
                else:
                    code = check(method, sent, status, checked)
                counts[f"{caller} {code}".strip()] += number

    await asyncio.gather(*(lane(seed) for seed in range(LANES)))
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for caller, metadata in callers.items():
            if caller != "unknown":
                call = stub.Generate(GENERATE[0], timeout=20, metadata=metadata)
                assert [response async for response in call][-1].HasField("finish")
        peer = callers.get("token", ())
        async with asyncio.timeout(20):
            while (
                load := await stub.GetLoad(pb.GetLoadRequest(), metadata=peer)
            ).running + load.waiting:
                await asyncio.sleep(0.05)


STEPS = (
    worker_pb.Step(
        step=1,
        starts=[
            worker_pb.SequenceStart(
                slot=slot,
                token_ids=pack([1, 2, 3]),
                blocks=pack([slot + 1]),
                sampling=worker_pb.SlotSampling(
                    temperature=0.5,
                    top_p=0.9,
                    seed=1,
                    frequency_penalty=0.5,
                    bias_ids=pack([3, 7]),
                    biases=pack_floats(np.array([1.5, -2.0], np.float32)),
                ),
            )
            for slot in range(2)
        ],
        prefill_slots=pack([0, 1]),
        prefill_counts=pack([3, 3]),
    ),
    worker_pb.Step(step=2, decode_slots=pack([0, 1])),
    worker_pb.Step(step=3, append_slots=pack([0]), append_blocks=pack([5])),
    worker_pb.Step(step=4),
)
RUN = Method(
    "Run",
    worker_pb.RunRequest,
    tuple(worker_pb.RunRequest(step=step) for step in STEPS),
    streams=True,
    answers=True,
)


def stream_of(rng: random.Random, epoch: int) -> list[bytes]:
    """The messages of a stream: mostly valid ones first, then steps that may be wrong."""
    hello = worker_pb.RunRequest(
        hello=worker_pb.Hello(protocol_version=PROTOCOL_VERSION, epoch=epoch)
    )
    sent = [hello.SerializeToString() if rng.random() < 0.95 else data_of(rng, RUN)]
    good = rng.randint(0, len(STEPS))
    sent += [request.SerializeToString() for request in RUN.seeds[:good]]
    for number in range(good + 1, good + rng.randint(1, 5)):
        message = worker_pb.RunRequest()
        data = data_of(rng, RUN) if rng.random() < 0.1 else decodable(rng, RUN)
        if rng.random() < 0.8 and decodes(RUN, data):
            message.ParseFromString(data)
            message.step.step = number  # a wrong number would hide other faults
            data = message.SerializeToString()
        sent.append(data)
    return sent


@pytest.mark.timeout(1800)
async def test_worker(worker: WorkerProcess, inputs: Inputs, tally: Tally) -> None:
    """Streams one after the other, each with a newer epoch."""
    counts, rng = tally("grpc Worker"), random.Random(0)
    left, epoch = inputs("grpc Worker"), 0
    async with open_channel(worker.address) as channel:
        await worker.until_serving(channel)
        while left > 0:
            epoch += 1
            sent = stream_of(rng, epoch)
            checked = rng.random() > 0.05
            status = await status_of(channel, WORKER + RUN.name, RUN, sent, checked)
            counts[check(RUN, sent, status, checked)] += len(sent)
            left -= len(sent)
        stream = await GrpcStream.open(channel, 2**64 - 1)
        await stream.send(STEPS[0])
        result = await asyncio.wait_for(stream.receive(), 20)
        assert len(result.token_ids) == 8
        assert not result.errors
        await stream.call.done_writing()
        assert await asyncio.wait_for(receive(stream.call), 20) is grpc.aio.EOF


def test_fuzzed_messages_cover_all_kinds() -> None:
    rng = random.Random(0)
    data = [data_of(rng, METHODS[0]) for _ in range(400)]
    good = [decodes(METHODS[0], piece) for piece in data]
    assert 0.5 < sum(good) / len(good) < 0.95
    filled: list[Any] = [fill(rng, pb.GenerateRequest()) for _ in range(1000)]
    assert any(m.chat.template_kwargs.fields for m in filled)
    assert any(m.stop.stop for m in filled)
    assert any(m.pair.document and m.HasField("pooling") for m in filled)
