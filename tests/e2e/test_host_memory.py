"""The embedded model with a quarter of the KV memory that its requests need, and host memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from pagewire.config import SchedulerConfig
from pagewire.models import EMBEDDED, resolve_model, served_name
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.scheduler.workers.link import WorkerLink
from support.clients.engine_client import generate
from support.processes.worker_process import WorkerProcess, worker_process
from support.waiting import eventually

PROMPTS = [f"Tell me a long story about {n} foxes and a river." for n in range(6)]
TOKENS = 112
AMPLE = 200
# Six requests of 8 blocks each.
TIGHT = 6 * 8 // 4 + 1
HOST_GB = 0.05


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"pagewire_scheduler_{name}", labels) or 0.0


class Scheduler:
    """An engine that checks its invariants after every step."""

    def __init__(self) -> None:
        self.fatal: list[BaseException] = []
        self.engine = Engine(
            SchedulerConfig(check_invariants=True, memory_threshold=1.0),
            served_name(EMBEDDED, None),
            Tokenizer(resolve_model(EMBEDDED)),
            lambda: None,
            self.fatal.append,
        )

    def all(self) -> "asyncio.Future[list[bytes]]":
        """The answers to all prompts, sent at once."""
        return asyncio.gather(*(generate(self.engine, prompt, TOKENS) for prompt in PROMPTS))

    async def settled(self) -> None:
        """Waits until no block is in use; checks that device and host blocks add up."""
        await eventually(lambda: not self.engine.num_open and not self.engine.load().used_blocks)
        for worker in self.engine._workers:
            batch = worker.batch
            assert batch.idle
            batch.check()
            pool = batch.pool
            assert pool.free + pool.idle == pool.total
            assert metric("host_blocks", state="used") == pool.host.used
        assert not self.fatal


@asynccontextmanager
async def scheduler(address: str) -> AsyncIterator[Scheduler]:
    """A scheduler with one worker that is ready."""
    made = Scheduler()
    link = asyncio.create_task(WorkerLink(address, made.engine).run())
    await eventually(lambda: made.engine.load().ready_workers, 60)
    yield made
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)


@contextmanager
def worker(folder: Path, num_blocks: int, host_gb: float, kv: str) -> Iterator[WorkerProcess]:
    folder.mkdir(exist_ok=True)
    settings = {"num_blocks": num_blocks, "num_slots": 8, "max_model_len": 160}
    settings |= {"kv_cache_dtype": kv}
    with worker_process(folder, EMBEDDED, host_memory_gb=host_gb, **settings) as process:
        yield process


async def undisturbed(address: str) -> list[bytes]:
    async with scheduler(address) as made:
        answers = await made.all()
        assert made.engine.load().preemptions == 0
        return answers


@pytest.mark.parametrize("kv", ["auto", "fp8"])
async def test_preemption_and_host_memory_do_not_change_answers(tmp_path: Path, kv: str) -> None:
    with ExitStack() as stack:
        # All start before the first is used, so that they load their models in parallel.
        ample = stack.enter_context(worker(tmp_path / "ample", AMPLE, 0.0, kv))
        tight = {
            host_gb: stack.enter_context(worker(tmp_path / f"tight-{host_gb}", TIGHT, host_gb, kv))
            for host_gb in (0.0, HOST_GB)
        }
        want = await undisturbed(ample.address)
        for host_gb, process in tight.items():
            async with scheduler(process.address) as made:
                before = metric("loaded_blocks_total")
                swapped = metric("preempted_returns_total", kind="swapped")
                assert await made.all() == want
                assert made.engine.load().preemptions > 0
                if host_gb:
                    assert metric("loaded_blocks_total") > before
                    assert metric("preempted_returns_total", kind="swapped") > swapped
                else:
                    assert metric("loaded_blocks_total") == before
                await made.settled()
                if host_gb:
                    assert await made.all() == want, "the second time, with cached prefixes"
                    await made.settled()


@pytest.mark.parametrize("kv", ["auto", "fp8"])
async def test_a_worker_is_killed_with_blocks_in_host_memory(tmp_path: Path, kv: str) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(worker(tmp_path, TIGHT, HOST_GB, kv))
        async with scheduler(first.address) as made:
            want = await made.all()
            before = metric("loaded_blocks_total")
            answers = made.all()
            await eventually(lambda: metric("loaded_blocks_total") > before, 60)
            assert metric("host_blocks", state="used") > 0
            first.process.kill()
            await eventually(lambda: not made.engine.load().ready_workers, 10)
            assert metric("host_blocks", state="total") == 0
            first.socket.unlink(missing_ok=True)
            stack.enter_context(worker(tmp_path, TIGHT, HOST_GB, kv))
            assert await asyncio.wait_for(answers, 120) == want
            await made.settled()
