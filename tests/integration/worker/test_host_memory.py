"""Blocks that a worker saves to the host's memory and loads back."""

import random
from pathlib import Path

import pytest

from pagewire.config import WorkerConfig
from pagewire.errors import RequestError
from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.errors import SetupError
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.startup.loading import load_worker
from support.models.saved_blocks import COUNT, SHARED, run_saved_and_loaded, start_step
from support.models.step_driver import local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model
from support.processes.worker_process import GrpcStream, serving_worker

BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, tokens, values, bytes
HOST_GB = 6.5 * BLOCK_BYTES / 1e9


def prompts() -> tuple[list[int], list[int]]:
    generator = random.Random(3)
    return tuple([generator.randrange(VOCAB) for _ in range(n)] for n in (40, 38))  # type: ignore


async def test_saved_blocks_come_back(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    ours, theirs = prompts()
    async with local_worker(tmp_path, host_memory_gb=HOST_GB) as worker:
        assert worker.limits.host_blocks == 6
        back, other, strange = await run_saved_and_loaded(worker, ours, theirs)
        assert not worker.fatal
    assert back == greedy_tokens(model, ours, COUNT)
    assert other == greedy_tokens(model, theirs, COUNT)
    assert strange != back, "what was not loaded was not needed"


async def test_what_a_worker_says_of_its_host_memory_was_measured(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    async with serving_worker(tmp_path, tmp_path, host_memory_gb=HOST_GB) as (_, channel):
        info = (await GrpcStream.open(channel, epoch=1)).ready
    assert info.host_blocks == 6
    assert 0 < info.load_block_seconds < 0.1
    assert 0 < info.save_block_seconds < 0.1
    assert 0 < info.prefill_token_seconds < 0.1
    assert 0 <= info.prefill_pair_seconds < info.prefill_token_seconds


def test_host_memory_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = WorkerConfig(model=str(tmp_path), device="cpu", num_blocks=40, host_memory_gb=1e-6)
    with pytest.raises(SetupError, match=r"--host-memory-gb 1e-06 does not hold one block"):
        load_worker(config)


async def test_a_step_that_names_an_unknown_block_ends_the_stream(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    async with local_worker(tmp_path) as worker:
        stream = worker.stream()
        await stream.send(pb.Step(step=1, saved_blocks=pack([1]), saved_host_blocks=pack([0])))
        with pytest.raises(RequestError, match="saved_host_blocks names block 0; this worker has "):
            await stream.receive()


async def test_what_a_step_saves_is_there_although_the_step_fails(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    ours, theirs = prompts()
    async with local_worker(tmp_path, host_memory_gb=HOST_GB) as worker:
        stream, backend = worker.stream(), worker.loaded.backend
        first = start_step(0, ours, [1, 2, 3])
        second = start_step(1, theirs, [2, 1, 4])
        second.saved_blocks, second.saved_host_blocks = pack([1, 2]), pack([5, 3])
        third = start_step(2, ours, [7, 9, 11], computed=SHARED)
        third.loaded_host_blocks, third.loaded_blocks = pack([5, 3]), pack([7, 9])
        submit, tokens = backend.submit, []
        for number, step in enumerate((first, second, third), 1):
            step.step = number
            backend.submit = _failing if step is second else submit  # type: ignore[method-assign]
            await stream.send(step)
            result = await stream.receive()
            assert [error.slot for error in result.errors] == ([1] if step is second else [])
            tokens += unpack(result.token_ids).tolist()
        assert not worker.fatal
    (expected,) = greedy_tokens(model, ours, 1)
    assert tokens == [expected, -1, expected]


def _failing(plan: DevicePlan) -> None:
    raise ValueError("a step that fails")


async def test_a_copy_that_fails_takes_the_worker_down(tmp_path: Path) -> None:
    """Otherwise the scheduler would use wrong content as that of these blocks."""
    save_model(tmp_path, "llama")
    async with local_worker(tmp_path, host_memory_gb=HOST_GB) as worker:

        def fail(copies: StepHostCopies) -> None:
            assert copies.saved.tolist() == [1]
            raise MemoryError("no memory for the copy")

        worker.loaded.backend.copy = fail  # type: ignore[method-assign]
        stream = worker.stream()
        await stream.send(pb.Step(step=1, saved_blocks=pack([1]), saved_host_blocks=pack([0])))
        await stream.send(pb.Step(step=2))
        result = await stream.receive()
        assert result.step == 2, "the step whose copy failed is not answered"
        assert [type(error) for error in worker.fatal] == [MemoryError]
