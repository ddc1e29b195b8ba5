"""Simulated workers as a process: several services in one, fencing, a real scheduler on top."""

import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.cli.launch.ports import free_port
from pagewire.packing import pack, unpack
from pagewire.rpc.transport import open_channel
from pagewire.v1 import inference_pb2 as public
from pagewire.v1 import inference_pb2_grpc
from pagewire.v1 import worker_pb2 as pb
from support.processes.scheduler_process import scheduler_process
from support.processes.simulated_workers import simulated_workers
from support.processes.worker_process import SERVING, GrpcStream

PROMPTS = [[5 + i, 6, 7, *range(20, 60 + 7 * i)] for i in range(12)]


def prefill(step: int, tokens: list[int]) -> pb.Step:
    start = pb.SequenceStart(
        slot=0,
        token_ids=pack(tokens),
        blocks=pack(range(1, 2 + len(tokens) // 16)),
        sampling=pb.SlotSampling(top_p=1.0),
    )
    return pb.Step(
        step=step, starts=[start], prefill_slots=pack([0]), prefill_counts=pack([len(tokens)])
    )


async def test_workers_of_one_process_are_services_of_their_own(tmp_path: Path) -> None:
    with simulated_workers(tmp_path, 2) as workers:
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(open_channel(a)) for a in workers.addresses]
            streams = []
            for channel in channels:
                request = health_pb2.HealthCheckRequest(service="pagewire.v1.Worker")
                health = await health_pb2_grpc.HealthStub(channel).Check(request)
                assert health.status == SERVING
                streams.append(await GrpcStream.open(channel, epoch=5))
            first, second = streams
            assert first.ready.instance_id != second.ready.instance_id
            assert first.ready.num_blocks == 54836
            await first.send(prefill(1, PROMPTS[0]))
            one = await first.receive()
            # A newer epoch takes over the first worker; the second continues undisturbed.
            newer = await GrpcStream.open(channels[0], epoch=6)
            assert (await first.status())[0] is grpc.StatusCode.ABORTED
            with pytest.raises(grpc.aio.AioRpcError, match="not newer than 6"):
                await GrpcStream.open(channels[0], epoch=6)
            for stream in (newer, second):
                await stream.send(prefill(1, PROMPTS[0]))
                assert unpack((await stream.receive()).token_ids) == unpack(one.token_ids)
                await stream.call.done_writing()
        workers.process.send_signal(signal.SIGTERM)
        assert workers.process.wait(20) == 0


@asynccontextmanager
async def scheduler(addresses: list[str]) -> AsyncIterator[Any]:
    """A scheduler on these workers that is ready, as a stub."""
    with scheduler_process(addresses) as address:
        async with open_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request, status = health_pb2.HealthCheckRequest(), None
            while status != SERVING:
                status = (await health.Check(request, wait_for_ready=True)).status
            yield inference_pb2_grpc.InferenceStub(channel)


async def outputs(stub: Any) -> list[list[int]]:
    calls = [
        stub.Generate(
            public.GenerateRequest(
                request_id=f"r{i}",
                prompt_token_ids=public.TokenIds(ids=tokens),
                sampling=public.SamplingParams(temperature=0.8, seed=i),
                stop=public.StopConditions(max_tokens=90, ignore_eos=True),
            )
        )
        for i, tokens in enumerate(PROMPTS)
    ]
    return [[t async for r in call for t in r.token_ids] for call in calls]


def loaded_blocks(metrics_port: int) -> float:
    """Blocks that the workers of a process have loaded from host memory."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as page:
        found = re.search(rb"^pagewire_worker_loaded_blocks_total (\S+)", page.read(), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_a_scheduler_gets_the_same_tokens_with_preemption_and_prefix_hits(
    tmp_path: Path,
) -> None:
    """One worker with enough blocks, then two that preempt: without host memory, and with host
    memory, which the second round of requests uses."""
    results = []
    tight = ("--count=2", "--num-blocks=24")
    port = free_port()
    for name, flags in (
        ("ample", ()),
        ("tight", tight),
        (
            "tight with host memory",
            (*tight, "--host-memory-gb=0.1", f"--worker-metrics-port={port}"),
        ),
    ):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        count = 2 if flags else 1
        with simulated_workers(folder, count, *flags, "--max-model-len=300") as workers:
            async with scheduler(workers.addresses) as stub:
                results.append(await outputs(stub))
                results.append(await outputs(stub))
                load = await stub.GetLoad(public.GetLoadRequest())
                if "host" in name:
                    assert loaded_blocks(port) > 0, "no block was loaded from host memory"
        assert (load.preemptions > 0) == (name != "ample")
    assert all(len(tokens) == 90 for tokens in results[0])
    assert all(result == results[0] for result in results)
    assert len(results) == 6


def test_the_sizes_of_all_workers_of_a_process_are_in_its_metrics(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--num-blocks=100", "--num-slots=8", f"--worker-metrics-port={port}")
    with (
        simulated_workers(tmp_path, 2, *flags),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page,
    ):
        lines = page.read().decode().splitlines()
    assert "pagewire_worker_slots 16.0" in lines
    assert "pagewire_worker_kv_cache_blocks 200.0" in lines
    for name in ("kv_cache_bytes", "weight_bytes"):
        assert f"pagewire_worker_{name} 0.0" not in lines
