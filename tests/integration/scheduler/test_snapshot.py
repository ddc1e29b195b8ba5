"""A scheduler's snapshot: correct, bounded, and without prompts."""

import asyncio
import time
from pathlib import Path

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1.snapshot_pb2 import REQUEST_PHASE_DECODE, SnapshotRequest
from support.scripted.scheduler_stack import stacks, worker_info
from support.waiting import eventually


def request(name: str, prompt: list[int], max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        prompt_token_ids=pb.TokenIds(ids=prompt),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_a_running_request_and_its_blocks_are_shown(tmp_path: Path) -> None:
    async with stacks(tmp_path) as start:
        stack = await start(worker_info())
        await stack.stub.GetSnapshot(SnapshotRequest())  # steps are recorded from now on
        calls = [
            stack.stub.Generate(request(f"r{number}", [*range(20, 31), number], 150))
            for number in range(2)
        ]
        readers = [asyncio.create_task(call.read()) for call in calls]
        await asyncio.gather(*readers)

        snapshot = await stack.stub.GetSnapshot(SnapshotRequest())
        assert snapshot.num_workers == 1
        [worker] = snapshot.workers
        assert sum(worker.device_blocks.counts) == 63
        assert worker.device_blocks.counts[2] + worker.device_blocks.counts[3] > 0
        assert sorted(snapshot.requests.ids) == ["r0", "r1"]
        assert list(snapshot.requests.prompt_tokens) == [12, 12]
        assert list(snapshot.requests.max_tokens) == [150, 150]
        assert REQUEST_PHASE_DECODE in snapshot.requests.phases
        assert snapshot.steps.last == len(snapshot.steps.ended) > 0
        assert sum(snapshot.steps.prefills) >= 12
        assert set(snapshot.steps.workers) == {1}
        assert max(snapshot.steps.ended) <= snapshot.now

        later = await stack.stub.GetSnapshot(SnapshotRequest(steps_after=snapshot.steps.last))
        assert len(later.steps.ended) == later.steps.last - snapshot.steps.last
        for call in calls:
            call.cancel()
        await eventually(lambda: stack.engine.num_open == 0)
        ended = await stack.stub.GetSnapshot(SnapshotRequest())
        assert list(ended.requests.ids) == []
        assert ended.workers[0].tree.num_nodes > 0


async def test_it_holds_the_event_loop_for_a_short_time(tmp_path: Path) -> None:
    """For a large GPU's pool, full of cached texts. CPU time: other processes do not delay it."""
    async with stacks(tmp_path) as start:
        stack = await start(worker_info(num_blocks=60_000, num_slots=256, budget=4096))
        [worker] = stack.engine._workers
        pool = worker.batch.pool
        for number in range(29_000):
            blocks = pool.allocate(2)
            pool.cache(blocks, b"".join(n.to_bytes(4, "little") for n in [number] * 8))
        longest, ended = 0.0, False

        async def watch() -> None:
            nonlocal longest
            while not ended:
                before = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - before)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        for _ in range(5):
            snapshot = await stack.engine.snapshots.take(0)
            assert len(snapshot.workers[0].device_blocks.cells) <= 1024
            assert len(snapshot.workers[0].tree.parents) <= 256
            assert snapshot.ByteSize() < 100_000
        ended = True
        await watching
        assert longest < 0.05
