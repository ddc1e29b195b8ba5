"""The embedded model with a fourth of the KV memory that its requests need, and host memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

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
    """An engine that checks its books after every step, and its links to workers."""

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
        """Every prompt at once."""
        return asyncio.gather(*(generate(self.engine, prompt, TOKENS) for prompt in PROMPTS))

    async def settled(self) -> None:
        """Every block of the device and of the host is accounted for."""
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
async def scheduler(*addresses: str) -> AsyncIterator[Scheduler]:
    made = Scheduler()
    links = [asyncio.create_task(WorkerLink(a, made.engine).run()) for a in addresses]
    await eventually(lambda: made.engine.load().ready_workers, 60)
    yield made
    for link in links:
        link.cancel()
    await asyncio.gather(*links, return_exceptions=True)


@contextmanager
def worker(folder: Path, num_blocks: int, host_gb: float) -> Iterator[WorkerProcess]:
    folder.mkdir(exist_ok=True)
    settings = {"num_blocks": num_blocks, "num_slots": 8, "max_model_len": 160}
    with worker_process(folder, EMBEDDED, host_memory_gb=host_gb, **settings) as process:
        yield process


async def undisturbed(tmp_path: Path) -> list[bytes]:
    with worker(tmp_path / "ample", AMPLE, 0.0) as ample:
        async with scheduler(ample.address) as made:
            answers = await made.all()
            assert made.engine.load().preemptions == 0
            return answers


async def test_answers_under_pressure_are_those_without(tmp_path: Path) -> None:
    want = await undisturbed(tmp_path)
    for host_gb in (0.0, HOST_GB):
        with worker(tmp_path / f"tight-{host_gb}", TIGHT, host_gb) as tight:
            async with scheduler(tight.address) as made:
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
                    assert await made.all() == want, "the second time with what is cached"
                    await made.settled()


async def test_a_worker_is_killed_with_blocks_on_the_host(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(worker(tmp_path, TIGHT, HOST_GB))
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
            stack.enter_context(worker(tmp_path, TIGHT, HOST_GB))
            assert await asyncio.wait_for(answers, 120) == want
            await made.settled()
