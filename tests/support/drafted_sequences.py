"""Sequences with right and wrong drafts, and checks that drafts do not change the outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.packing import pack, pack_floats
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.ops.reference import attention
from pagewire.worker.ops.reference import ops as torch_ops
from support.models.constrained_sequences import constrained
from support.models.step_driver import LocalWorker, Sequence, StepDriver

LIKELY = [40, 41, 44, 49]


def accepted(worker: LocalWorker, drafter: str = "suffix") -> int:
    """The number of accepted drafts."""
    return worker.engine.metrics.drafts.value(drafter, "accepted")


def repetitive(seed: int, period: int = 7) -> list[int]:
    """A prompt of random tokens that repeat with a period."""
    return [40 + (seed * 31 + i * i) % 900 for i in range(period)] * 6


def sampling(**fields: Any) -> pb.SlotSampling:
    """A sampling in which few tokens are likely, so that drafts are right and wrong."""
    return pb.SlotSampling(
        **({"top_p": 1.0} | fields), bias_ids=pack(LIKELY), biases=pack_floats([14.0] * len(LIKELY))
    )


def sequences(length: int) -> list[Sequence]:
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
        Sequence(repetitive(i, 5 + 3 * i), length - i, sampling=way) for i, way in enumerate(ways)
    ]
    return [*made, constrained(1), constrained(2, presence_penalty=0.1)]


def check_same(got: list[Sequence], want: list[Sequence]) -> None:
    """Checks that tokens are equal, and log probabilities as near as in another batch."""
    for ours, theirs in zip(got, want, strict=True):
        assert not ours.failure
        assert ours.output == theirs.output
        assert len(ours.logprobs) == len(theirs.logprobs)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one[1] == other[1]
            assert one[2] == pytest.approx(other[2], abs=2e-5)


def compute_rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes each row by itself, because torch's GEMMs and attention depend on the batch."""
    multiply, multiply_into = F.linear, torch.mm

    def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([multiply(x[i : i + 1], weight, bias) for i in range(len(x))])

    def mm_by_rows(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        for i in range(len(x)):
            multiply_into(x[i : i + 1], weight, out=out[i : i + 1])
        return out

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
    monkeypatch.setattr(torch, "mm", mm_by_rows)
    monkeypatch.setattr(torch_ops, "decode_attention", attention_by_rows)


async def check_resumption(
    worker: LocalWorker, length: int, known: tuple[int, ...], run_ahead: int
) -> None:
    """Checks that a sequence that starts with a part of its output continues unchanged."""
    driver = StepDriver(worker.stream(), worker.limits)
    for way in (sampling(), sampling(temperature=0.6, seed=9, frequency_penalty=0.1)):
        whole = Sequence(repetitive(3), length, sampling=way)
        (output,) = await driver.run([whole], run_ahead=2)
        assert len(output) == length
        for count in known:
            rest = Sequence(
                repetitive(3) + output[:count], length - count, generated=count, sampling=way
            )
            assert await driver.run([rest], run_ahead=run_ahead) == [output[count:]]


async def check_failed_step(worker: LocalWorker, length: int) -> None:
    """Checks that a failed step with drafts ends its own sequences and no others."""
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
    failed = [Sequence(repetitive(i), length, sampling=sampling()) for i in range(3)]
    await driver.run(failed, run_ahead=2)
    for sequence in failed:
        assert "this step fails" in sequence.failure
        assert sequence.output[-1] == -1
    again = [Sequence(repetitive(i), length, sampling=sampling()) for i in range(3)]
    outputs = await driver.run(again, run_ahead=2)
    for sequence, output in zip(failed, outputs, strict=True):
        drawn = [token for token in sequence.output if token >= 0]
        assert output[: len(drawn)] == drawn
        assert len(output) == length
        assert min(output) >= 0
    assert worker.fatal == []
