"""The simulated device behind the worker's real engine: its tokens and their times."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pagewire.simulator.addresses import addresses_of
from pagewire.simulator.backend import SimulatedBackend, work_of
from pagewire.simulator.step_time import StepTime, Work
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.protocol.session import Session
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from support.models.step_driver import LocalStream, Sequence, StepDriver

LIMITS = Limits(
    vocab_size=1000,
    num_slots=16,
    block_size=16,
    num_blocks=256,
    max_model_len=512,
    max_num_batched_tokens=2048,
)
FLAT = StepTime(0.010, 0, 0, 0, 0)


@dataclass
class Worker:
    backend: SimulatedBackend
    engine: StepExecutor

    limits: Limits = LIMITS

    def driver(self) -> StepDriver:
        return StepDriver(LocalStream(self.engine, Session(1, self.limits)), self.limits)


@asynccontextmanager
async def simulated(
    speedup: float = 0, step_time: StepTime = FLAT, limits: Limits = LIMITS
) -> AsyncIterator[Worker]:
    fatal: list[BaseException] = []
    backend = SimulatedBackend(limits, step_time, speedup)
    launcher = QueueThread("launcher", fatal.append)
    engine = StepExecutor(backend, launcher, WorkerMetrics(CollectorRegistry()), fatal.append)
    yield Worker(backend, engine, limits)
    await asyncio.to_thread(engine.close)
    assert not fatal


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed * 1000 + length)
    return [generator.randrange(LIMITS.vocab_size) for _ in range(length)]


def seeded(tokens: list[int], wanted: int, seed: int, generated: int = 0) -> Sequence:
    sampling = pb.SlotSampling(temperature=1.0, top_p=1.0, seed=seed)
    return Sequence(tokens, wanted, generated, sampling)


async def test_tokens_do_not_depend_on_batch_chunks_or_run_ahead() -> None:
    async with simulated() as worker:
        driver = worker.driver()
        (alone,) = await driver.run([Sequence(prompt(41), 40)])
        beside = [Sequence(prompt(7), 9), Sequence(prompt(41), 40), seeded(prompt(41), 40, 3)]
        _, again, other = await driver.run(beside, chunk=5, run_ahead=4)
    assert again == alone
    assert other != alone
    assert len(set(alone)) > 20


@pytest.mark.parametrize("seed", [None, -7])
async def test_a_resumed_sequence_goes_on_with_the_same_tokens(seed: int | None) -> None:
    def sequence(tokens: list[int], wanted: int, generated: int = 0) -> Sequence:
        if seed is None:
            return Sequence(tokens, wanted, generated)
        return seeded(tokens, wanted, seed, generated)

    async with simulated() as worker:
        (whole,) = await worker.driver().run([sequence(prompt(30), 50)])
    async with simulated() as worker:  # another worker
        known = prompt(30) + whole[:21]
        (rest,) = await worker.driver().run([sequence(known, 29, 21)], chunk=17, run_ahead=3)
    assert rest == whole[21:]


async def test_a_wrong_history_gives_other_tokens() -> None:
    async with simulated() as worker:
        (whole,) = await worker.driver().run([Sequence(prompt(30), 20)])
        lost = prompt(30) + whole[:5] + whole[6:10]
        twice = prompt(30) + whole[:5] + whole[4:10]
        for known in (lost, twice):
            (rest,) = await worker.driver().run([Sequence(known, 10, 9)])
            assert sum(a == b for a, b in zip(rest, whole[10:], strict=True)) <= 1


async def run_steps(worker: Worker, *steps: pb.Step) -> list[int]:
    stream = LocalStream(worker.engine, Session(1, LIMITS))
    tokens: list[int] = []
    for number, step in enumerate(steps, 1):
        step.step = number
        await stream.send(step)
    for _ in steps:
        result = await stream.receive()
        assert not result.errors
        tokens += np.frombuffer(result.token_ids, np.int32).tolist()
    return tokens


def started(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> pb.Step:
    start = pb.SequenceStart(
        slot=slot,
        token_ids=np.array(tokens, np.int32).tobytes(),
        num_computed=computed,
        blocks=np.array(blocks, np.int32).tobytes(),
        sampling=pb.SlotSampling(top_p=1.0),
    )
    counts = np.array([len(tokens) - computed], np.int32)
    return pb.Step(
        starts=[start],
        prefill_slots=np.array([slot], np.int32).tobytes(),
        prefill_counts=counts.tobytes(),
    )


async def test_a_cached_prefix_is_read_from_its_blocks() -> None:
    tokens = prompt(40)
    async with simulated() as worker:
        (plain,) = await run_steps(worker, started(0, tokens, [3, 9, 5]))
        (shared,) = await run_steps(worker, started(1, tokens, [3, 9, 8], computed=32))
        (strange,) = await run_steps(worker, started(2, tokens, [3, 7, 6], computed=32))
    assert shared == plain
    assert strange != plain, "block 7 holds no such prefix"


async def test_a_block_given_up_too_early_gives_other_tokens() -> None:
    """Nothing behind the window is read; all KV that a token sees must still be available."""
    windowed = replace(LIMITS, window=40, num_blocks=40)
    sequences = [Sequence(prompt(length), 60) for length in (100, 110, 120)]
    async with simulated(limits=windowed) as worker:
        whole = await worker.driver().run([Sequence(s.tokens, 60) for s in sequences])
    few = replace(windowed, num_blocks=22)
    async with simulated(limits=few) as worker:
        assert await worker.driver().run(sequences, chunk=16, free=True) == whole
    async with simulated(limits=few) as worker:
        worker.backend._limits = replace(few, window=80)  # as of another model
        again = [Sequence(s.tokens, 60) for s in sequences]
        freed = await worker.driver().run(again, chunk=16, free=True)
    async with simulated(limits=replace(windowed, window=80)) as worker:
        kept = await worker.driver().run([Sequence(s.tokens, 60) for s in sequences])
    assert freed != kept


async def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    async with simulated() as worker:
        (free,) = await worker.driver().run([Sequence(prompt(9), 1)])
        banned = [free[0], (free[0] + 1) % LIMITS.vocab_size]
        sampling = pb.SlotSampling(top_p=1.0, min_tokens=1, stop_token_ids=banned)
        (held,) = await worker.driver().run([Sequence(prompt(9), 1, sampling=sampling)])
    assert held[0] not in banned


async def test_log_probabilities_come_with_the_tokens_that_want_them() -> None:
    step = started(0, prompt(20), [1, 2])
    step.starts[0].sampling.logprobs = 3
    step.step = 1
    async with simulated() as worker:
        stream = LocalStream(worker.engine, Session(1, LIMITS))
        await stream.send(step)
        result = await stream.receive()
    (token,) = np.frombuffer(result.token_ids, np.int32)
    assert np.frombuffer(result.logprob_rows, np.int32).tolist() == [0]
    assert np.frombuffer(result.top_ids, np.int32).tolist() == [token, token + 1, token + 2]
    top = np.exp(np.frombuffer(result.top_logprobs, np.float32))
    assert top.tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8])


async def test_prompt_tokens_are_ranked_against_greedy_choice() -> None:
    async with simulated() as worker:
        driver = worker.driver()
        greedy = Sequence(prompt(20), 12, sampling=pb.SlotSampling(top_p=1.0))
        (output,) = await driver.run([greedy])
        likely = Sequence([*prompt(20), *output], 1, prompt_top=2, first_scored=20)
        other = (output[0] + 2) % LIMITS.vocab_size
        unlikely = Sequence([*prompt(20), other], 1, prompt_top=0, first_scored=20)
        await driver.run([likely, unlikely], chunk=5)
    assert likely.ranks == [1] * 12
    assert [ids[0] for _, ids, _ in likely.prompt_logprobs] == output
    assert np.exp([top for *_, top in likely.prompt_logprobs]) == pytest.approx(
        np.array([[1 / 2, 1 / 4]] * 12)
    )
    assert unlikely.ranks == [3]
    assert np.exp(unlikely.prompt_logprobs[0][0]) == pytest.approx(1 / 8)


async def test_steps_sent_ahead_run_back_to_back_without_a_busy_core() -> None:
    wanted = 40
    async with simulated(speedup=2) as worker:
        began, cpu = time.monotonic(), time.process_time()
        await worker.driver().run([Sequence(prompt(9), wanted)], run_ahead=2)
        took, used = time.monotonic() - began, time.process_time() - cpu
    # One step prefills; the last one computes nothing but lasts its time.
    assert 0.98 < took / ((wanted + 1) * 0.005) < 2.5, "a loaded machine may be late, never early"
    assert used < took / 2


def test_submitted_steps_queue_on_the_device_and_an_idle_device_waits() -> None:
    now = [100.0]
    slept: list[float] = []
    backend = SimulatedBackend(LIMITS, FLAT, 1, clock=lambda: now[0], sleep=slept.append)
    first, second = backend.submit(_empty()), backend.submit(_empty())
    assert (first.done_at, second.done_at) == pytest.approx((100.01, 100.02))
    assert backend.wait(first).duration_us == 10_000
    assert slept == pytest.approx([0.01])
    now[0] = 200.0
    assert backend.submit(_empty()).done_at == pytest.approx(200.01)


def _empty() -> DevicePlan:
    none: Any = np.empty(0, np.int32)
    return DevicePlan(None, None, none, none, None, none, none, False)


async def test_work_counts_rows_their_context_and_prefill_pairs() -> None:
    plans: list[DevicePlan] = []
    async with simulated() as worker:
        submit = worker.backend.submit
        worker.backend.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore
        await worker.driver().run([Sequence(prompt(10), 3), Sequence(prompt(4), 3)], chunk=6)
    # 6 + 4 tokens; then 4 more beside the second's first decode, at 5 tokens.
    assert work_of(plans[0]) == Work(1, 0, 0, 10, 21 + 10)
    assert work_of(plans[1]) == Work(1, 1, 5, 4, 7 + 8 + 9 + 10)


def test_addresses_of_several_workers() -> None:
    assert addresses_of("127.0.0.1:500", 1) == ["127.0.0.1:500"]
    assert addresses_of("[::1]:500", 2) == ["[::1]:500", "[::1]:501"]
    assert addresses_of("127.0.0.1:0", 2) == ["127.0.0.1:0"] * 2
    assert addresses_of("unix:/run/w", 2) == ["unix:/run/w.0", "unix:/run/w.1"]
    with pytest.raises(ValueError, match="3 workers from port 65534 on"):
        addresses_of("a:65534", 3)
