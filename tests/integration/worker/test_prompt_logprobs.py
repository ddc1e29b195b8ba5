"""Log probabilities of prompt tokens equal those of transformers, with any chunks."""

import random
from pathlib import Path

import pytest
import torch

from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.runtime import device_logprobs
from support.models.logprob_checks import assert_logprobs
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, log_probabilities, save_model

# For each sequence: known tokens, generated ones among them, likeliest tokens, first position.
WANTED = [
    (2, 0, 0, 1),
    (33, 0, 3, 1),
    (40, 0, None, 1),
    (61, 7, 20, 1),
    (48, 0, 1, 19),
    (1, 0, 2, 1),
]
COUNT = 4


def sequences(wanted: bool = True) -> list[Sequence]:
    generator = random.Random(3)
    return [
        Sequence(
            [generator.randrange(VOCAB) for _ in range(length)],
            COUNT,
            generated=generated,
            sampling=pb.SlotSampling(temperature=1.3, top_p=1.0, seed=length),
            prompt_top=top if wanted else None,
            first_scored=first,
        )
        for length, generated, top, first in WANTED
    ]


@pytest.mark.parametrize(("chunk", "run_ahead"), [(9, 3), (1000, 1)])
@pytest.mark.parametrize("variant", ["llama", "qwen3-tied", "gemma2", "cohere2", "deepseek-v2"])
async def test_values_equal_those_of_transformers(
    tmp_path: Path, variant: str, chunk: int, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_logprobs, "MAX_PROMPT_LOGITS", 20 * VOCAB)  # 16 rows at a time
    model = save_model(tmp_path, variant, initializer_range=0.1)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        expected = await driver.run(sequences(wanted=False), chunk=chunk, run_ahead=run_ahead)
        scored = sequences()
        outputs = await driver.run(scored, chunk=chunk, run_ahead=run_ahead)
    assert outputs == expected, "what is drawn does not depend on it"
    for sequence, (length, generated, top, first) in zip(scored, WANTED, strict=True):
        targets = sequence.tokens[first : length - generated]
        if top is None or not targets:
            assert not sequence.prompt_logprobs
            continue
        reference = log_probabilities(model, sequence.tokens[:first], targets)
        assert_logprobs(sequence.prompt_logprobs, targets, reference, top)
        own = reference[torch.arange(len(targets)), targets][:, None]
        ranks = (reference > own).sum(-1) + 1
        assert sequence.ranks == ranks.tolist()


async def test_a_sequence_that_fails_has_none(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    async with local_worker(tmp_path) as worker:
        stream = worker.stream()
        start = {"token_ids": pack([1, 2, 3]), "sampling": pb.SlotSampling(top_p=1.0)}
        await stream.send(
            pb.Step(
                step=1,
                starts=[
                    pb.SequenceStart(slot=0, blocks=pack([1]), prompt_logprobs=21, **start),
                    pb.SequenceStart(slot=1, blocks=pack([2]), prompt_logprobs=1, **start),
                    pb.SequenceStart(
                        slot=2,
                        blocks=pack([3]),
                        prompt_logprobs=1,
                        first_prompt_logprob=1,
                        **start,
                    ),
                ],
                prefill_slots=pack([0, 1, 2]),
                prefill_counts=pack([3, 3, 3]),
            )
        )
        result = await stream.receive()
    assert [error.slot for error in result.errors] == [0, 1]
    assert "prompt_logprobs 21 exceeds 20" in result.errors[0].message
    assert "first_prompt_logprob 0 is not above the 0 computed" in result.errors[1].message
    assert unpack(result.prompt_logprobs.slots).tolist() == [2]
    assert unpack(result.prompt_logprobs.begins).tolist() == [1]
    assert unpack(result.prompt_logprobs.counts).tolist() == [2]
    assert len(result.prompt_logprobs.top_ids) == 8
