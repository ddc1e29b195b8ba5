"""Drafts that the device makes, through the graph backend's code on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.models import resolve_model
from pagewire.packing import pack, pack_floats
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.backend import LoadedWorker, Outcome
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime import eager
from pagewire.worker.runtime.timer import HostTimer
from support.models import host_graphs
from support.models.constrained_sequences import constrained
from support.models.host_graphs import HostGraphBackend, with_host_graphs
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker

FOLDER = resolve_model("embedded")
LENGTH = 44
LIKELY = [40, 41, 44, 49]


def repetitive(seed: int, period: int = 7) -> list[int]:
    """A prompt that says the same thing over and over."""
    return [40 + (seed * 31 + i * i) % 900 for i in range(period)] * 6


def sampling(**fields: Any) -> pb.SlotSampling:
    """Few tokens are likely, so that drafts are right and wrong."""
    return pb.SlotSampling(
        **({"top_p": 1.0} | fields), bias_ids=pack(LIKELY), biases=pack_floats([14.0] * len(LIKELY))
    )


def sequences() -> list[Sequence]:
    """Every way of drawing tokens, and prompts and outputs of several lengths."""
    ways = [
        pb.SlotSampling(top_p=1.0),
        sampling(),
        sampling(logprobs=3),
        sampling(temperature=0.7, seed=1),
        sampling(temperature=0.3, seed=2, logprobs=0),
        sampling(temperature=0.9, seed=3, top_k=3, min_p=0.1, top_p=0.9),
        sampling(temperature=0.2, seed=4, presence_penalty=0.3, frequency_penalty=0.05),
        sampling(repetition_penalty=1.05, logprobs=2),
        sampling(min_tokens=30, stop_token_ids=[40, 41, 2]),
    ]
    made = [
        Sequence(repetitive(i, 5 + 3 * i), LENGTH - i, sampling=way) for i, way in enumerate(ways)
    ]
    return [*made, constrained(1), constrained(2, presence_penalty=0.1)]


class RunsAhead(HostGraphBackend):
    """Its results are read late, as those of a GPU: once another step has been submitted."""

    synchronous = False

    def __init__(self, *arguments: Any) -> None:
        self._submitted = threading.Condition()
        self._numbers: dict[int, int] = {}
        self._number = 0
        super().__init__(*arguments)
        self.synchronous = False

    def submit(self, plan: DevicePlan) -> Any:
        handle = super().submit(plan)
        with self._submitted:
            self._number += 1
            self._numbers[id(handle)] = self._number
            self._submitted.notify_all()
        return handle

    def wait(self, handle: Any) -> Outcome:
        with self._submitted:
            number = self._numbers.pop(id(handle))
            # None may follow: the driver reads this result first, or a mask needs it.
            self._submitted.wait_for(lambda: self._number > number, timeout=0.03)
        return super().wait(handle)

    def _to_host(self, results: Tensor) -> Tensor:
        return results.clone()


def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[LoadedWorker], LoadedWorker]:
    """What makes a loaded CPU worker draft as one on a GPU does, as often as it can."""
    as_graphs = with_host_graphs(monkeypatch)
    monkeypatch.setattr(host_graphs, "HostGraphBackend", RunsAhead)
    monkeypatch.setattr(eager, "DeviceTimer", HostTimer)

    def adapt(loaded: LoadedWorker) -> LoadedWorker:
        limits = replace(loaded.limits, drafts_on_device=True)
        loaded = as_graphs(replace(loaded, limits=limits))
        measured = loaded.backend.row_costs
        assert measured is not None
        assert (measured.seconds > 0).all()
        costs = RowCosts(measured.rows, np.ones(len(measured.rows)), 0.0)
        loaded.backend.row_costs = costs
        return loaded

    return adapt


def accepted(worker: LocalWorker) -> int:
    return worker.engine.metrics.drafts.value("suffix", "accepted")


async def run(
    adapt: Callable[[LoadedWorker], LoadedWorker], speculate: str, **cut: int
) -> tuple[list[Sequence], float]:
    """The sequences with their results, and how many drafts were right."""
    limits = {"num_blocks": 512, "max_model_len": 512}
    async with local_worker(FOLDER, adapt, speculate=speculate, **limits) as worker:
        ran = sequences()
        await StepDriver(worker.stream(), worker.limits).run(ran, **cut)
        assert worker.fatal == []
        return ran, accepted(worker)


def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's GEMMs and attention depend on the batch, so each row is computed by itself."""
    from pagewire.worker.ops.reference import attention
    from pagewire.worker.ops.reference import ops as torch_ops

    multiply = F.linear

    def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([multiply(x[i : i + 1], weight, bias) for i in range(len(x))])

    def attention_by_rows(q: Tensor, *given: Any, out: Tensor | None = None, **more: Any) -> Tensor:
        *caches, slots, lengths, scale = given
        rows = [
            attention.decode_attention(
                q[i : i + 1], *caches, slots[i : i + 1], lengths[i : i + 1], scale, **more
            )
            for i in range(len(q))
        ]
        whole = torch.cat(rows)
        if out is None:
            return whole
        return out.copy_(torch.where((lengths < 0)[:, None, None], out, whole))

    monkeypatch.setattr(F, "linear", linear_by_rows)
    monkeypatch.setattr(torch_ops, "decode_attention", attention_by_rows)


@pytest.mark.parametrize("cut", [{"run_ahead": 2}, {"run_ahead": 3, "chunk": 16}])
async def test_tokens_are_those_of_steps_without_drafts(
    monkeypatch: pytest.MonkeyPatch, cut: dict[str, int]
) -> None:
    want, _ = await run(lambda loaded: loaded, "none", **cut)
    got, right = await run(drafting(monkeypatch), "suffix", **cut)
    assert right > 50
    for ours, theirs in zip(got, want, strict=True):
        assert not ours.failure
        assert ours.output == theirs.output
        assert len(ours.logprobs) == len(theirs.logprobs)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one[1] == other[1]
            assert one[2] == pytest.approx(other[2], abs=2e-5)


async def test_log_probabilities_have_the_same_bits_where_rows_do_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows_by_themselves(monkeypatch)
    want, _ = await run(with_host_graphs(monkeypatch), "none", run_ahead=2)
    got, right = await run(drafting(monkeypatch), "suffix", run_ahead=2)
    assert right > 50
    assert [s.output for s in got] == [s.output for s in want]
    assert [s.logprobs for s in got] == [s.logprobs for s in want]


async def test_a_sequence_goes_on_where_it_was_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    adapt = drafting(monkeypatch)
    limits = {"num_blocks": 256, "max_model_len": 512}
    async with local_worker(FOLDER, adapt, speculate="suffix", **limits) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        for way in (sampling(), sampling(temperature=0.6, seed=9, frequency_penalty=0.1)):
            whole = Sequence(repetitive(3), LENGTH, sampling=way)
            (output,) = await driver.run([whole], run_ahead=2)
            assert len(output) == LENGTH
            for known in (1, 30):
                rest = Sequence(
                    repetitive(3) + output[:known], LENGTH - known, generated=known, sampling=way
                )
                assert await driver.run([rest], run_ahead=3) == [output[known:]]
        assert accepted(worker) > 30
        assert worker.fatal == []


async def test_a_failed_step_fails_its_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    adapt = drafting(monkeypatch)
    limits = {"num_blocks": 256, "max_model_len": 512}
    async with local_worker(FOLDER, adapt, speculate="suffix", **limits) as worker:
        backend, drafted = worker.loaded.backend, 0
        submit = backend.submit

        def failing(plan: Any) -> Any:
            nonlocal drafted
            drafted += plan.drafts is not None
            if drafted == 4:
                drafted += 1
                raise RuntimeError("this step fails")
            return submit(plan)

        backend.submit = failing  # type: ignore[method-assign]
        driver = StepDriver(worker.stream(), worker.limits)
        failed = [Sequence(repetitive(i), LENGTH, sampling=sampling()) for i in range(3)]
        await driver.run(failed, run_ahead=2)
        for sequence in failed:
            assert "this step fails" in sequence.failure
        again = [Sequence(repetitive(i), LENGTH, sampling=sampling()) for i in range(3)]
        outputs = await driver.run(again, run_ahead=2)
        for sequence, output in zip(failed, outputs, strict=True):
            drawn = [token for token in sequence.output if token >= 0]
            assert output[: len(drawn)] == drawn
            assert len(output) == LENGTH
            assert min(output) >= 0
        assert worker.fatal == []
