"""The health of processes with a stalled or lost device, or a stalled event loop."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pagewire.config import SchedulerConfig
from pagewire.packing import pack
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.incoming_request import IncomingRequest
from pagewire.scheduler.text.tokenizer import TokenIdsOnly
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.v1 import inference_pb2 as inference_pb
from pagewire.v1 import worker_pb2 as pb
from support.models.tiny_models import save_model
from support.processes.worker_process import GrpcStream, channel_to, worker_process
from support.waiting import eventually

STEP_TIMEOUT = 1.0
SECONDS_TO_NOTICE = 2.0
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def faulty_device(folder: Path) -> str:
    """Code of a worker whose device stalls while a file `stuck` exists, or fails if `lost` does."""
    return f"""
import pathlib, time
from pagewire.worker.runtime.eager import EagerBackend
sound = EagerBackend.submit
def submit(self, plan):
    while pathlib.Path("{folder}/stuck").exists():
        time.sleep(0.01)
    if pathlib.Path("{folder}/lost").exists():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return sound(self, plan)
EagerBackend.submit = submit
"""


HANGING_WARM_UP = """
import time
from pagewire.worker.runtime.eager import EagerBackend
EagerBackend.warm_up = lambda self: time.sleep(1000)
"""


def first_step() -> pb.Step:
    start = pb.SequenceStart(
        slot=0,
        token_ids=pack([3, 4, 5]),
        blocks=pack([1]),
        sampling=pb.SlotSampling(top_p=1.0),
    )
    return pb.Step(step=1, starts=[start], prefill_slots=pack([0]), prefill_counts=pack([3]))


async def seconds_until(condition: Callable[[], "asyncio.Future[bool]"]) -> float:
    began = time.monotonic()
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_a_worker_stuck_in_its_start_ends(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    settings = {"start_phase_timeout": 4.0}  # a slow machine needs seconds for its imports
    with worker_process(tmp_path, tmp_path / "tiny", HANGING_WARM_UP, **settings) as worker:
        assert await worker.exit_status() == 1
        assert "the start has made no progress for 8 s" in worker.log
        assert "KV cache" in worker.log, "the phases before are not named"
        assert "most recent call first" in worker.log, "no stacks"


async def test_a_worker_stuck_in_a_step_is_not_ready_until_it_moves(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    prologue = faulty_device(tmp_path)
    settings = {"step_timeout": STEP_TIMEOUT * 5}
    with worker_process(tmp_path, tmp_path / "tiny", prologue, **settings) as worker:
        async with channel_to(worker) as channel:
            stream = await GrpcStream.open(channel, epoch=1)
            (tmp_path / "stuck").touch()
            await stream.send(first_step())

            async def is_not_serving() -> bool:
                return await worker.health(channel) == NOT_SERVING

            noticed = await seconds_until(is_not_serving)
            assert noticed < settings["step_timeout"] + SECONDS_TO_NOTICE
            code, details = await stream.status()
            assert (code, "stuck in a step" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            with pytest.raises(grpc.aio.AioRpcError, match="stuck in a step"):
                await GrpcStream.open(channel, epoch=2)
            assert "the launcher has made no progress" in worker.log
            assert "most recent call first" in worker.log, "no stacks"
            (tmp_path / "stuck").unlink()
            await worker.until_serving(channel)
            again = await GrpcStream.open(channel, epoch=3)
            await again.send(first_step())
            assert (await again.receive()).step == 1


async def test_a_slow_step_keeps_new_requests_away_and_what_runs_goes_on(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    prologue = faulty_device(tmp_path)
    engine = Engine(SchedulerConfig(), "tiny", TokenIdsOnly(tmp_path / "tiny"), lambda: None)
    with worker_process(
        tmp_path, tmp_path / "tiny", prologue, unready_after=SECONDS_TO_NOTICE - 0.5
    ) as worker:
        link = asyncio.create_task(WorkerLink(worker.address, engine).run())
        async with channel_to(worker) as channel:
            await eventually(lambda: engine.ready, 20)
            (tmp_path / "stuck").touch()
            buffer = DeltaBuffer()
            message = inference_pb.GenerateRequest(
                prompt_token_ids=inference_pb.TokenIds(ids=[3, 4, 5]),
                stop=inference_pb.StopConditions(max_tokens=20, ignore_eos=True),
                detokenize=False,
            )
            engine.intake.submit(IncomingRequest.of(message), buffer, stream=1)

            async def is_not_serving() -> bool:
                return await worker.health(channel) == NOT_SERVING

            # One check of this test, and one of the watchdog that began before the step.
            assert await seconds_until(is_not_serving) < SECONDS_TO_NOTICE + 0.5
            await eventually(lambda: not engine.ready)
            assert engine.load().running == 1, "what runs stays"
            (tmp_path / "stuck").unlink()
            await eventually(lambda: engine.ready and engine.num_open == 0)
            assert len(buffer.finished) == 1
            assert buffer.finished[0].finish.usage.completion_tokens == 20
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)


async def test_a_worker_that_stays_stuck_ends(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    prologue = faulty_device(tmp_path)
    with worker_process(tmp_path, tmp_path / "tiny", prologue, step_timeout=STEP_TIMEOUT) as worker:
        async with channel_to(worker) as channel:
            stream = await GrpcStream.open(channel, epoch=1)
            (tmp_path / "stuck").touch()
            await stream.send(first_step())
            assert await asyncio.wait_for(worker.exit_status(), 20) == 1
            assert "the launcher has made no progress for 2 s" in worker.log


async def test_a_worker_without_its_device_ends_within_two_seconds(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama")
    with worker_process(tmp_path, tmp_path / "tiny", faulty_device(tmp_path)) as worker:
        async with channel_to(worker) as channel:
            stream = await GrpcStream.open(channel, epoch=1)
            (tmp_path / "lost").touch()
            await stream.send(first_step())
            status = await asyncio.wait_for(worker.exit_status(), SECONDS_TO_NOTICE)
            assert status == 1
            assert "illegal memory access" in worker.log


def test_a_service_whose_event_loop_is_stuck_ends_with_its_stacks_in_the_log() -> None:
    code = """
import time
import pagewire.lifecycle.process as process
process.LOOP_SECONDS = 0.4
async def main(stop):
    time.sleep(60)
process.run_service(main)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert "the event loop has made no progress for 0.8 s" in ended.stderr
    assert "most recent call first" in ended.stderr
    assert "in main" in ended.stderr
