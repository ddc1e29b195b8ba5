"""A scheduler and scripted workers in this process, connected by sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire.config import SchedulerConfig
from pagewire.rpc.checksums import MULTIPLEX, ChecksumInterceptor, open_stream
from pagewire.rpc.transport import SERVER_OPTIONS, open_channel
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.requests.text_helper import read_tokenizer
from pagewire.scheduler.service import InferenceService, RawRequests
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from pagewire.v1 import worker_pb2 as worker_pb
from support.models.tokenizer_folders import byte_level_folder
from support.scripted.scripted_worker import ScriptedWorker, token_at

VOCAB = 300
TEXT_VOCAB = 4096  # vocabulary of workers for text prompts; the tokenizer's size
MODEL = "scripted"


def worker_info(
    num_blocks: int = 64, num_slots: int = 8, budget: int = 64, vocab_size: int = VOCAB
) -> worker_pb.WorkerInfo:
    return worker_pb.WorkerInfo(
        model=MODEL,
        block_size=4,
        num_blocks=num_blocks,
        num_slots=num_slots,
        max_model_len=200,
        vocab_size=vocab_size,
        max_num_batched_tokens=budget,
    )


@dataclass
class Stack:
    """A scheduler and its workers."""

    engine: Engine
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceStub
    workers: list[ScriptedWorker]
    addresses: list[str]
    port: int  # of the scheduler, for clients that cannot use its socket file

    async def wait_ready(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.engine.load().ready_workers != count:
                await asyncio.sleep(0.01)

    def multiplex(self) -> grpc.aio.StreamStreamCall:
        """A gateway's stream."""
        return open_stream(self.channel, MULTIPLEX)

    def assert_clean(self) -> None:
        load = self.engine.load()
        assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
        assert self.engine.num_open == 0
        for worker in self.engine._workers:
            worker.batch.check()
        assert [w.problems for w in self.workers] == [[] for _ in self.workers]

    async def settle(self) -> None:
        async with asyncio.timeout(5):
            while self.engine.load().used_blocks or self.engine.num_open:
                await asyncio.sleep(0.01)
        self.assert_clean()


StartStack = Callable[..., Awaitable[Stack]]


@asynccontextmanager
async def stacks(tmp_path: Path) -> AsyncIterator[StartStack]:
    """Starts stacks: a WorkerInfo for each worker, and settings of the scheduler by name."""
    model = byte_level_folder(tmp_path / "model")
    texts = {"model": str(model), "served_model_name": MODEL, "max_prompt_chars": 5000}
    cleanup = []

    async def start_stack(*infos: worker_pb.WorkerInfo, **settings: object) -> Stack:
        config = SchedulerConfig(**{"check_invariants": True, **texts, **settings})
        engine = Engine(config, MODEL, read_tokenizer(config), lambda: None)
        server = grpc.aio.server(
            interceptors=[ChecksumInterceptor(), RawRequests()], options=SERVER_OPTIONS
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(engine), server)
        server.add_insecure_port(f"unix:{tmp_path}/scheduler.sock")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = open_channel(f"unix:{tmp_path}/scheduler.sock")
        workers, addresses, links = [], [], []
        for number, info in enumerate(infos):
            address = f"unix:{tmp_path}/worker-{number}.sock"
            worker = ScriptedWorker(info)
            await worker.start(address)
            workers.append(worker)
            addresses.append(address)
            link = WorkerLink(address, engine, step_timeout=config.step_timeout)
            links.append(asyncio.create_task(link.run()))
        stack = Stack(
            engine, channel, inference_pb2_grpc.InferenceStub(channel), workers, addresses, port
        )
        cleanup.append((engine, server, channel, links, workers))
        await stack.wait_ready(len(infos))
        return stack

    try:
        yield start_stack
    finally:
        for engine, server, channel, links, workers in cleanup:
            for link in links:
                link.cancel()
            await channel.close()
            await server.stop(None)
            await engine.intake.helpers.close()
            for worker in workers:
                await worker.stop()


def request(prompt: list[int], max_tokens: int, **fields: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=prompt), **fields)
    message.stop.max_tokens = max_tokens
    message.stop.ignore_eos = True
    return message


def expected(prompt: list[int], count: int, vocab_size: int = VOCAB) -> list[int]:
    return [token_at(prompt, index, vocab_size) for index in range(count)]


async def read_all(call: grpc.aio.StreamStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def collect(call: AsyncIterator[pb.GenerateResponse]) -> tuple[list[int], str, pb.Finish]:
    tokens: list[int] = []
    text = ""
    finish = pb.Finish()
    async for response in call:
        if response.token_ids:
            assert response.index == len(tokens)
        tokens += response.token_ids
        text += response.text
        if response.HasField("finish"):
            finish = response.finish
    return tokens, text, finish
