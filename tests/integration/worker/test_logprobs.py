"""The worker's log probabilities are those of transformers, before any step of sampling."""

import random
from pathlib import Path

import numpy as np
import pytest

from pagewire.packing import pack, pack_floats
from pagewire.v1 import worker_pb2 as pb
from support.models.logprob_checks import assert_logprobs
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, log_probabilities, save_model

LENGTHS = (1, 16, 33)
COUNT = 24


def prompts() -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def sampling(num_top: int | None, **fields: object) -> pb.SlotSampling:
    adjusted = {
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "bias_ids": pack([3, 5]),
        "biases": pack_floats(np.array([4.0, -2.0], np.float32)),
    }
    drawn = {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "seed": 5, **adjusted, **fields}
    return pb.SlotSampling(**drawn, logprobs=num_top)


@pytest.mark.parametrize("run_ahead", [1, 3])
async def test_values_are_of_the_raw_logits(tmp_path: Path, run_ahead: int) -> None:
    model = save_model(tmp_path, "qwen3", initializer_range=0.1)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        plain = [Sequence(prompt, COUNT, sampling=sampling(None)) for prompt in prompts()]
        expected = await driver.run(plain, chunk=9, run_ahead=run_ahead)
        wanted = [0, 3, 20]
        mixed = [
            Sequence(prompt, COUNT, sampling=sampling(num_top))
            for prompt, num_top in zip(prompts(), wanted, strict=True)
        ]
        mixed.insert(1, Sequence(prompts()[0], COUNT, sampling=sampling(None)))
        outputs = await driver.run(mixed, chunk=9, run_ahead=run_ahead)
        assert [outputs[0], *outputs[2:]] == expected, "what is drawn does not depend on it"
        assert not mixed.pop(1).logprobs
        assert not any(sequence.logprobs for sequence in plain)
        for sequence, num_top in zip(mixed, wanted, strict=True):
            reference = log_probabilities(model, sequence.tokens, sequence.output)
            assert_logprobs(sequence.logprobs, sequence.output, reference, num_top)


async def test_a_stop_token_that_may_not_be_drawn_keeps_its_probability(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    prompt = prompts()[1]
    greedy = Sequence(prompt, 2, sampling=pb.SlotSampling(top_p=1.0, logprobs=1))
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        ((first, _),) = await driver.run([greedy])
        banned = pb.SlotSampling(top_p=1.0, logprobs=1, min_tokens=2, stop_token_ids=[first])
        held = Sequence(prompt, 2, sampling=banned)
        ((other, *_),) = await driver.run([held])
    assert other != first
    assert held.logprobs[0][1][0] == first, "the likeliest token, although it was banned"
    expected = log_probabilities(model, prompt, held.output)
    assert_logprobs(held.logprobs, held.output, expected, 1)


async def test_rows_that_failed_have_none(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    async with local_worker(tmp_path) as worker:
        stream = worker.stream()
        start = {"token_ids": pack([1, 2]), "sampling": pb.SlotSampling(top_p=1.0, logprobs=2)}
        bad = {**start, "sampling": pb.SlotSampling(top_p=1.0, logprobs=21)}
        await stream.send(
            pb.Step(
                step=1,
                starts=[
                    pb.SequenceStart(slot=0, blocks=pack([1]), **bad),
                    pb.SequenceStart(slot=1, blocks=pack([2]), **start),
                ],
                prefill_slots=pack([0, 1]),
                prefill_counts=pack([2, 2]),
            )
        )
        result = await stream.receive()
    assert [error.slot for error in result.errors] == [0]
    assert "logprobs 21 exceeds 20" in result.errors[0].message
    assert result.logprob_rows == pack([1])
    assert len(result.logprobs) == 4
    assert (len(result.top_ids), len(result.top_logprobs)) == (8, 8)
