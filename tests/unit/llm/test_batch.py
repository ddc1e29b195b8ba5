"""Batches with schedulers that the test plays itself."""

import asyncio
from array import array

import pytest

from pagewire.errors import Code, RequestError
from pagewire.llm import SamplingParams, batch
from pagewire.llm.batch import Batch, JobFailedError
from pagewire.llm.prompts import completion_task
from pagewire.v1 import inference_pb2 as pb

MODEL = pb.Model(id="m", max_model_len=64)


class Schedulers:
    """Records what is submitted and aborted; the test ends generations by hand."""

    def __init__(self):
        self.submitted, self.aborted = [], []
        self.refused = None

    def submit(self, candidates):
        if self.refused is not None:
            raise self.refused
        self.submitted.append(candidates)

    def abort(self, generation):
        self.aborted.append(generation)


def jobs(count, **params):
    return [completion_task("hi", SamplingParams(**params), MODEL).job for _ in range(count)]


def end(generation, tokens=2):
    generation.receive_prompt(pb.PromptOutput(token_ids=bytes(8)))
    generation.extend(array("i", range(tokens)).tobytes(), b"", 0.0)
    generation.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH))


def fail(generation):
    generation.fail(RequestError(Code.INTERNAL, "broken"))


async def test_all_candidates_are_submitted_together_and_waited_for():
    schedulers = Schedulers()
    running = Batch(schedulers, jobs(2, n=2), stop_at_failure=True)
    task = asyncio.create_task(running.run(None))
    await asyncio.sleep(0)
    assert [len(candidates) for candidates in schedulers.submitted] == [2, 2]
    for candidates in schedulers.submitted:
        for generation in candidates:
            assert not task.done()
            end(generation)
    await asyncio.wait_for(task, 1)
    assert not schedulers.aborted


async def test_only_so_many_are_open_at_once(monkeypatch):
    monkeypatch.setattr(batch, "MAX_OPEN", 3)
    schedulers = Schedulers()
    task = asyncio.create_task(Batch(schedulers, jobs(5), stop_at_failure=True).run(None))
    await asyncio.sleep(0)
    for ended, submitted in enumerate((3, 4, 5, 5, 5)):
        assert len(schedulers.submitted) == submitted
        end(schedulers.submitted[ended][0])
        await asyncio.sleep(0.01)
    await asyncio.wait_for(task, 1)


async def test_a_failure_ends_the_batch_and_aborts_the_others():
    schedulers = Schedulers()
    running = Batch(schedulers, jobs(3), stop_at_failure=True)
    task = asyncio.create_task(running.run(None))
    await asyncio.sleep(0)
    end(schedulers.submitted[0][0])
    fail(schedulers.submitted[1][0])
    with pytest.raises(JobFailedError) as caught:
        await asyncio.wait_for(task, 1)
    assert (caught.value.index, caught.value.failure.message) == (1, "broken")
    assert schedulers.aborted == [schedulers.submitted[2][0]]


async def test_or_the_others_go_on():
    schedulers = Schedulers()
    running = Batch(schedulers, jobs(2), stop_at_failure=False)
    task = asyncio.create_task(running.run(None))
    await asyncio.sleep(0)
    fail(schedulers.submitted[0][0])
    await asyncio.sleep(0.01)
    assert not task.done()
    end(schedulers.submitted[1][0])
    await asyncio.wait_for(task, 1)
    assert [str(running.failure_of(i)) for i in range(2)] == ["broken", "None"]


async def test_what_cannot_be_submitted_fails():
    schedulers = Schedulers()
    schedulers.refused = RequestError(Code.INVALID_ARGUMENT, "too large")
    running = Batch(schedulers, jobs(2), stop_at_failure=False)
    await asyncio.wait_for(running.run(None), 1)
    assert [str(running.failure_of(i)) for i in range(2)] == ["too large"] * 2


async def test_a_cancelled_batch_aborts_everything():
    schedulers = Schedulers()
    task = asyncio.create_task(Batch(schedulers, jobs(2), stop_at_failure=True).run(None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(schedulers.aborted) == 2


async def test_progress_is_reported():
    schedulers, reports = Schedulers(), []
    running = Batch(schedulers, jobs(2, n=2), stop_at_failure=True)
    task = asyncio.create_task(
        running.run(lambda prompts, tokens: reports.append((prompts, tokens)))
    )
    await asyncio.sleep(0.01)
    end(schedulers.submitted[0][0])
    for generation in (schedulers.submitted[0][1], *schedulers.submitted[1]):
        end(generation)
    await asyncio.wait_for(task, 1)
    assert reports[0] == (0, 0)
    assert reports[-1] == (2, 8)
