"""The step executor: order of answers, failures of rows and steps, the two threads of a GPU."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagewire.errors import Code, RequestError
from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol import executor
from pagewire.worker.protocol.backend import LoadedWorker, Outcome
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime.eager import EagerBackend
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model
from support.waiting import eventually

POISON = 7  # a token whose embedding is NaN in `poisoned`


class DeferredBackend(EagerBackend):
    """Behaves as on a GPU: a step ends some time after `submit` has returned."""

    synchronous = False

    def __init__(self, inner: EagerBackend) -> None:
        self.inner = inner
        self.mask_memory = inner.mask_memory
        self.submitted = 0
        self.most_ahead = 0

    def submit(self, plan: DevicePlan) -> Any:
        self.submitted += 1
        return self.inner.submit(plan), self.submitted

    def wait(self, handle: Any) -> Outcome:
        time.sleep(0.005)
        self.most_ahead = max(self.most_ahead, self.submitted - handle[1])
        return self.inner.wait(handle[0])

    def scrub(self, blocks: Any) -> None:
        self.inner.scrub(blocks)


def deferred(loaded: LoadedWorker) -> LoadedWorker:
    assert isinstance(loaded.backend, EagerBackend)
    return replace(loaded, backend=DeferredBackend(loaded.backend))


def as_loaded(loaded: LoadedWorker) -> LoadedWorker:
    return loaded


def change_ops(loaded: LoadedWorker, **ops: Callable[..., Any]) -> LoadedWorker:
    assert isinstance(loaded.backend, EagerBackend)
    decoder = loaded.backend._decoder
    decoder.ops = SimpleNamespace(**{**vars(decoder.ops), **ops})
    return loaded


def poisoned(loaded: LoadedWorker) -> LoadedWorker:
    assert isinstance(loaded.backend, EagerBackend)
    with torch.inference_mode():
        loaded.backend._decoder.weights.embedding[POISON] = float("nan")
    return loaded


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed * 1000 + length)
    return [generator.choice([t for t in range(VOCAB) if t != POISON]) for _ in range(length)]


@pytest.mark.parametrize("adapt", [as_loaded, deferred])
async def test_steps_sent_ahead_give_the_same_tokens(
    tmp_path: Path, adapt: Callable[[LoadedWorker], LoadedWorker]
) -> None:
    model = save_model(tmp_path, "llama")
    expected = [greedy_tokens(model, prompt(n), 12) for n in (3, 20, 41)]
    async with local_worker(tmp_path, adapt) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(prompt(n), 12) for n in (3, 20, 41)]
        assert await driver.run(sequences, chunk=9, run_ahead=4) == expected
        if isinstance(worker.loaded.backend, DeferredBackend):
            assert worker.loaded.backend.most_ahead >= 2


async def test_slots_are_in_use_until_steps_stay_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama")
    released = threading.Event()
    async with local_worker(tmp_path, deferred) as worker:
        gauge, backend = worker.engine.metrics.slots_in_use, worker.loaded.backend

        def in_use() -> float:
            [metric] = gauge.collect()
            return metric.samples[0].value

        def wait_late(handle: Any, wait: Callable[[Any], Outcome] = backend.wait) -> Outcome:
            released.wait()
            return wait(handle)

        monkeypatch.setattr(executor, "IDLE_SECONDS", 0.0)
        monkeypatch.setattr(backend, "wait", wait_late)
        assert in_use() == 0
        stream = worker.stream()
        start = {"token_ids": pack([1, 2]), "sampling": pb.SlotSampling(top_p=1.0)}
        starts = [pb.SequenceStart(slot=s, blocks=pack([s + 1]), **start) for s in (0, 1)]
        chunk = {"prefill_slots": pack([0, 1]), "prefill_counts": pack([2, 2])}
        await stream.send(pb.Step(step=1, starts=starts, **chunk))
        await eventually(lambda: in_use() == 2)
        monkeypatch.setattr(executor, "IDLE_SECONDS", 3600.0)
        released.set()
        await stream.receive()
        await worker.engine.settled()
        assert in_use() == 2  # the scheduler may send the next step
        monkeypatch.setattr(executor, "IDLE_SECONDS", 0.0)
        assert in_use() == 0


@pytest.mark.parametrize("stuck", ["submit", "wait"])
async def test_it_is_settled_once_a_stuck_step_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    """A new stream waits for that: its steps would wait behind the stuck one."""
    save_model(tmp_path, "llama")
    released = threading.Event()
    async with local_worker(tmp_path, deferred) as worker:
        await worker.engine.settled()
        run = getattr(worker.loaded.backend, stuck)

        def run_late(given: Any) -> Any:
            released.wait()
            return run(given)

        monkeypatch.setattr(worker.loaded.backend, stuck, run_late)
        driver = StepDriver(worker.stream(), worker.limits)
        answered = asyncio.create_task(driver.run([Sequence(prompt(3), 1)]))
        await asyncio.sleep(0)  # the step is sent
        settled = asyncio.create_task(worker.engine.settled())
        done, _ = await asyncio.wait([settled], timeout=0.2)
        assert not done
        released.set()
        await asyncio.wait_for(settled, 10)
        await answered


async def test_seeded_draws_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", initializer_range=0.05)

    def sequence(seed: int, **known: Any) -> Sequence:
        sampling = pb.SlotSampling(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, seed=seed)
        return Sequence(**({"tokens": prompt(9), "wanted": 20} | known), sampling=sampling)

    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        (alone,) = await driver.run([sequence(-5)])
        greedy = Sequence(prompt(30), 20)
        _, beside, other = await driver.run([greedy, sequence(-5), sequence(6)], chunk=4)
        (resumed,) = await driver.run(
            [sequence(-5, tokens=prompt(9) + alone[:8], wanted=12, generated=8)]
        )
    assert beside == alone
    assert other != alone
    assert resumed == alone[8:]
    assert len(set(alone)) > 5


async def test_penalties_of_a_restarted_sequence_look_at_what_it_had(tmp_path: Path) -> None:
    """Its tokens are those of a run without preemption, at any point and in any slot."""
    save_model(tmp_path, "qwen3", initializer_range=0.05)
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}

    def sequence(seed: int, known: list[int], wanted: int, **fields: float) -> Sequence:
        sampling = pb.SlotSampling(temperature=0.8, top_k=40, top_p=0.95, seed=seed, **fields)
        return Sequence(prompt(9) + known, wanted, len(known), sampling=sampling)

    async with local_worker(tmp_path, num_slots=3) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        first = [sequence(1, [], 40, **penalties), sequence(2, [], 40), sequence(1, [], 40)]
        penalized, plain, same_seed = await driver.run(first, run_ahead=3)
        assert penalized != same_seed
        for at in (1, 13, 39):
            again = [
                sequence(2, plain[:at], 40 - at),
                sequence(1, penalized[:at], 40 - at, **penalties),
            ]
            rest, penalized_rest = await driver.run(again, chunk=5, run_ahead=2)
            assert rest == plain[at:]
            assert penalized_rest == penalized[at:]


async def test_stop_tokens_cannot_be_drawn_before_min_tokens(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    free = greedy_tokens(model, prompt(12), 6)
    sampling = pb.SlotSampling(top_p=1.0, min_tokens=3, stop_token_ids=[free[0], free[3]])
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        (held,) = await driver.run([Sequence(prompt(12), 6, sampling=sampling)])
        resumed = Sequence(prompt(12) + free[:3], 3, generated=3, sampling=sampling)
        (after,) = await driver.run([resumed])
    assert not {free[0], free[3]} & set(held[:3])
    assert after == free[3:]


@pytest.mark.parametrize("second", [as_loaded, deferred])
async def test_row_that_is_not_finite_fails_alone_and_leaves_no_nan(
    tmp_path: Path, second: Callable[[LoadedWorker], LoadedWorker]
) -> None:
    model = save_model(tmp_path, "llama")
    lengths = (5, 20, 33)
    expected = [greedy_tokens(model, prompt(n), 16) for n in lengths]
    # So few blocks that the next sequences get those of the failed one.
    async with local_worker(
        tmp_path, lambda loaded: second(poisoned(loaded)), num_blocks=14, max_model_len=96
    ) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        good = [Sequence(prompt(n), 16) for n in lengths]
        bad = Sequence([*prompt(30), POISON, *prompt(9)], 8)
        outputs = await driver.run([good[0], bad, *good[1:]], chunk=16, run_ahead=3)
        assert outputs[1] == [-1] * 8
        assert "not finite" in bad.failure
        assert "token 0" in bad.failure
        assert [outputs[0], *outputs[2:]] == expected
        assert not any(sequence.failure for sequence in good)

        again = await driver.run([Sequence(prompt(n), 16) for n in lengths])
        assert again == expected
        again = await driver.run([Sequence(prompt(n), 16) for n in reversed(lengths)])
        assert again == expected[::-1]


@pytest.mark.parametrize("second", [as_loaded, deferred])
async def test_failed_step_fails_its_sequences_and_the_worker_goes_on(
    tmp_path: Path, second: Callable[[LoadedWorker], LoadedWorker]
) -> None:
    save_model(tmp_path, "llama")
    calls = 0

    def fail_in_the_third_step(loaded: LoadedWorker) -> LoadedWorker:
        sample = loaded.backend._decoder.ops.sample

        def failing(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("no room for the logits")
            return sample(*arguments)

        return second(change_ops(loaded, sample=failing))

    async with local_worker(tmp_path, fail_in_the_third_step) as worker:
        stream = worker.stream()
        start = {"token_ids": pack([1, 2]), "sampling": pb.SlotSampling(top_p=1.0)}
        starts = [pb.SequenceStart(slot=s, blocks=pack([s + 1]), **start) for s in (0, 1)]
        chunk = {"prefill_slots": pack([0, 1]), "prefill_counts": pack([2, 2])}
        await stream.send(pb.Step(step=1, starts=starts, **chunk))
        await stream.send(pb.Step(step=2, decode_slots=pack([0])))
        third = pb.SequenceStart(slot=2, blocks=pack([3]), **start)
        await stream.send(
            pb.Step(step=3, starts=[third], prefill_slots=pack([2]), prefill_counts=pack([2]))
        )
        await stream.send(pb.Step(step=4, decode_slots=pack([1, 0, 2])))
        results = [await stream.receive() for _ in range(4)]

        assert [result.step for result in results] == [1, 2, 3, 4]
        assert unpack(results[2].token_ids).tolist() == [-1, -1]
        errors = {error.slot: error for error in results[2].errors}
        assert set(errors) == {0, 2}
        assert all(error.retryable for error in errors.values())
        assert "no room for the logits" in errors[0].message
        tokens = unpack(results[3].token_ids).tolist()
        assert tokens[0] >= 0, "slot 1 had no part in the failed step"
        assert tokens[1:] == [-1, -1]
        assert not results[3].errors
        # The same slot and blocks serve a new sequence.
        await stream.send(pb.Step(step=5, starts=starts, decode_slots=b"", **chunk))
        result = await stream.receive()
        assert result.token_ids == results[0].token_ids
        assert not worker.fatal


@pytest.mark.parametrize("second", [as_loaded, deferred])
async def test_lost_device_is_reported_as_fatal(
    tmp_path: Path, second: Callable[[LoadedWorker], LoadedWorker]
) -> None:
    save_model(tmp_path, "llama")

    def failing(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    async with local_worker(
        tmp_path, lambda loaded: second(change_ops(loaded, sample=failing))
    ) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        await driver.run([Sequence([1], 1)])
        assert ["CUDA error" in str(error) for error in worker.fatal] == [True]


async def refused(worker: LocalWorker, *steps: pb.Step) -> tuple[list[pb.StepResult], RequestError]:
    """The results before the stream ends, and the error that ends it."""
    stream = worker.stream()
    for step in steps:
        await stream.send(step)
    results = []
    while True:
        try:
            results.append(await asyncio.wait_for(stream.receive(), 10))
        except RequestError as error:
            return results, error


@pytest.mark.parametrize("adapt", [as_loaded, deferred])
async def test_malformed_step_ends_the_stream_after_earlier_answers(
    tmp_path: Path, adapt: Callable[[LoadedWorker], LoadedWorker]
) -> None:
    save_model(tmp_path, "llama")
    async with local_worker(tmp_path, adapt) as worker:
        results, error = await refused(
            worker, pb.Step(step=1), pb.Step(step=2), pb.Step(step=4), pb.Step(step=5)
        )
        assert [result.step for result in results] == [1, 2]
        assert error.code == Code.INVALID_ARGUMENT
        assert "step 4 came where step 3 was due" in error.message

        results, error = await refused(worker, pb.Step(step=1, decode_slots=b"abcd\x01"))
        assert not results
        assert "decode_slots has 5 bytes" in error.message

        results, error = await refused(worker, pb.Step(step=1, decode_slots=pack([16])))
        assert "slot 16" in error.message
