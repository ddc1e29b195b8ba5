"""Drafts that the device makes, through the graph backend's code on a CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from support.device_drafts import SharedWorker, drafting_worker, one_step_at_a_time
from support.drafted_sequences import (
    accepted,
    check_failed_step,
    check_resumption,
    check_same,
    compute_rows_by_themselves,
    sequences,
)
from support.models.host_graphs import with_host_graphs
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n"
FOLDER = resolve_model("embedded")
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
# Steps of few tokens, because each size of a step is run when a worker starts.
LIMITS = {"num_blocks": 512, "max_model_len": 512, "worker_max_num_batched_tokens": 192}
LENGTH = 44
CUTS = {"whole prompts": {"run_ahead": 2}, "chunks": {"run_ahead": 3, "chunk": 16}}


Results = dict[str, list[Sequence]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedWorker]:
    """A worker that drafts."""
    async with drafting_worker() as workers:
        yield workers


@pytest_asyncio.fixture(loop_scope="module")
async def worker(shared: SharedWorker) -> LocalWorker:
    """The worker that drafts, with empty caches."""
    return await shared.get(FOLDER, speculate="suffix", **LIMITS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rows_by_themselves() -> Results:
    """The results without drafts of graphs that compute each row by itself, by the way of cutting
    prompts."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        async with local_worker(FOLDER, with_host_graphs(patch), **LIMITS) as plain:
            compute_rows_by_themselves(patch)
            for name, cut in CUTS.items():
                found[name] = sequences(LENGTH)
                await StepDriver(plain.stream(), plain.limits).run(found[name], **cut)
            assert plain.fatal == []
    return found


async def run(
    worker: LocalWorker, predicted: list[Sequence] | None = None, **cut: int
) -> tuple[list[Sequence], float]:
    """The sequences with their results, and the number of right drafts.

    The sequences of `predicted` get their earlier outputs, with an edit, as predictions.
    """
    drafter = "suffix" if predicted is None else "prediction"
    ran, right = sequences(LENGTH), accepted(worker, drafter)
    for sequence, before in zip(ran, predicted or (), strict=predicted is not None):
        sequence.prediction = edited(before.output)
    await StepDriver(worker.stream(), worker.limits).run(ran, **cut)
    assert worker.fatal == []
    return ran, accepted(worker, drafter) - right


def edited(tokens: list[int]) -> list[int]:
    """The tokens with one replaced, some left out and some inserted."""
    return [*tokens[:9], 7, *tokens[10:16], *tokens[20:30], 8, 9, *tokens[30:]]


@pytest.mark.parametrize("cut", CUTS)
async def test_tokens_are_those_of_steps_without_drafts(worker: LocalWorker, cut: str) -> None:
    async with local_worker(FOLDER, **LIMITS) as plain:
        want, _ = await run(plain, **CUTS[cut])
    got, right = await run(worker, **CUTS[cut])
    assert right > 50
    check_same(got, want)


async def test_log_probabilities_have_the_same_bits_where_rows_do_not_depend_on_the_batch(
    worker: LocalWorker, rows_by_themselves: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_rows_by_themselves(monkeypatch)
    want = rows_by_themselves["whole prompts"]
    got, right = await run(worker, run_ahead=2)
    assert right > 50
    assert [s.output for s in got] == [s.output for s in want]
    assert [s.logprobs for s in got] == [s.logprobs for s in want]


@pytest.mark.parametrize("cut", CUTS)
async def test_predictions_change_no_bits(
    worker: LocalWorker,
    rows_by_themselves: Results,
    monkeypatch: pytest.MonkeyPatch,
    cut: str,
) -> None:
    compute_rows_by_themselves(monkeypatch)
    want = rows_by_themselves[cut]
    got, right = await run(worker, predicted=want, **CUTS[cut])
    assert right > 70
    check_same(got, want)
    # One with a penalty has no drafts, so it ends last: its steps of one row add in another order.
    for ours, theirs in zip(got, want, strict=True):
        if not ours.sampling.repetition_penalty:
            assert ours.logprobs == theirs.logprobs


@pytest.mark.parametrize(
    "way", [pb.SlotSampling(top_p=1), pb.SlotSampling(top_p=1, temperature=1, seed=5)]
)
async def test_a_prediction_takes_fewer_steps_and_is_counted(
    worker: LocalWorker, way: pb.SlotSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_step_at_a_time(monkeypatch)
    prompt = TOKENIZER.encode(CHAT).ids
    async with local_worker(FOLDER) as plain:
        driver = StepDriver(plain.stream(), plain.limits)
        (want,) = await driver.run([Sequence(prompt, LENGTH, sampling=way)])
    for prediction, right, steps in ((want, 0.8, 10), (edited(want), 0.5, 20), ([3], 0, 50)):
        driver = StepDriver(worker.stream(), worker.limits)
        guided = Sequence(prompt, LENGTH, sampling=way, prediction=prediction)
        assert await driver.run([guided]) == [want]
        assert driver.accepted[pb.DRAFTER_PREDICTION] >= right * LENGTH - 4
        assert driver.number <= steps
    for known in (1, 20):
        rest = Sequence(prompt + want[:known], LENGTH - known, known, way, prediction=want)
        driver = StepDriver(worker.stream(), worker.limits)
        assert await driver.run([rest]) == [want[known:]]
        assert driver.accepted[pb.DRAFTER_PREDICTION] > 0.6 * (LENGTH - known)
    assert worker.fatal == []


async def test_recent_outputs_change_no_bits(
    worker: LocalWorker, rows_by_themselves: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_rows_by_themselves(monkeypatch)
    want = rows_by_themselves["whole prompts"]
    driver, before = StepDriver(worker.stream(), worker.limits), accepted(worker, "recent")
    for again in range(2):
        got = sequences(LENGTH)
        await driver.run(got, run_ahead=3)
        check_same(got, want)
        # One with a penalty has no drafts, so it ends last: see above.
        for ours, theirs in zip(got, want, strict=True):
            if not ours.sampling.repetition_penalty:
                assert ours.logprobs == theirs.logprobs
        assert (accepted(worker, "recent") - before > 50) == bool(again)
    assert worker.fatal == []


@pytest.mark.parametrize(
    "way", [pb.SlotSampling(top_p=1), pb.SlotSampling(top_p=1, temperature=1, seed=5)]
)
async def test_recent_outputs_of_the_same_salt_are_drafts_and_of_no_other(
    worker: LocalWorker, way: pb.SlotSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_step_at_a_time(monkeypatch)
    prompt = TOKENIZER.encode(CHAT).ids
    outputs = []
    driver = StepDriver(worker.stream(), worker.limits)

    async def ran(salt: str) -> tuple[int, int]:
        """The number of steps of an answer, and of right drafts from recent outputs."""
        before = driver.number, driver.accepted[pb.DRAFTER_RECENT]
        outputs.extend(await driver.run([Sequence(prompt, LENGTH, sampling=way, salt=salt)]))
        return driver.number - before[0], driver.accepted[pb.DRAFTER_RECENT] - before[1]

    first, right = await ran("one tenant")
    assert right == 0
    for salt in ("another", ""):
        assert await ran(salt) == (first, 0)
    for salt in ("one tenant", ""):
        steps, right = await ran(salt)
        assert steps <= LENGTH / 4
        assert right > 0.8 * LENGTH - 8
    assert all(output == outputs[0] for output in outputs)
    other = StepDriver(worker.stream(), worker.limits)
    await other.run([Sequence(prompt, LENGTH, sampling=way, salt="one tenant")])
    assert other.drafts[pb.DRAFTER_RECENT] == 0, "a new stream of steps knows no outputs"
    assert worker.fatal == []


async def test_outputs_of_sequences_that_still_run_are_no_drafts(worker: LocalWorker) -> None:
    """Only ended outputs are recent, and a reused slot has the newest."""
    prompt = TOKENIZER.encode(CHAT).ids
    driver = StepDriver(worker.stream(), worker.limits)
    await driver.run([Sequence(prompt, LENGTH) for _ in range(3)], run_ahead=3)
    assert driver.drafts[pb.DRAFTER_RECENT] == 0
    await driver.run([Sequence(prompt, LENGTH) for _ in range(3)], run_ahead=3)
    assert driver.accepted[pb.DRAFTER_RECENT] > 2 * LENGTH


async def test_a_sequence_goes_on_where_it_was_preempted(worker: LocalWorker) -> None:
    before = accepted(worker)
    await check_resumption(worker, LENGTH, (1, 30), run_ahead=3)
    assert accepted(worker) - before > 30
    assert worker.fatal == []


async def test_a_failed_step_fails_its_sequences_alone(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = worker.loaded.backend
    monkeypatch.setattr(backend, "submit", backend.submit)  # the check replaces it
    await check_failed_step(worker, LENGTH)
