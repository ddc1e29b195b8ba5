"""Greedy sequences with penalties and biases, compared with the formula."""

import random
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pagewire.packing import pack, pack_floats, unpack, unpack_floats
from pagewire.v1 import worker_pb2 as pb
from support.models.step_driver import LocalWorker, Sequence, StepDriver
from support.models.tiny_models import VOCAB, greedy_tokens

COUNT = 64
ADJUSTED = {
    "repetition": {"repetition_penalty": 1.3},
    "rewarded repetition": {"repetition_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.05},
    "presence": {"presence_penalty": 0.1},
    "rewarded presence": {"presence_penalty": -0.02, "frequency_penalty": -0.02},
    "biases": {"bias": {0: 0.4, 113: -100.0, VOCAB - 1: 0.5}},
    "all": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.03,
        "presence_penalty": 0.05,
        "bias": {3: 0.5, 90: -0.4},
    },
}


async def check_adjusted_tokens(worker: LocalWorker, model: PreTrainedModel) -> None:
    """Runs all of `ADJUSTED` beside a plain sequence, also in reused slots and resumed.

    The worker needs a slot for each. Logits of its model should differ by tenths.
    """
    generator = random.Random(7)
    prompt = [generator.randrange(VOCAB) for _ in range(20)]
    samplings = [_sampling(**fields) for fields in ADJUSTED.values()]
    expected = [_adjusted_tokens(model, prompt, sampling) for sampling in samplings]
    plain = greedy_tokens(model, prompt, COUNT)
    assert len({tuple(tokens) for tokens in (plain, *expected)}) == len(ADJUSTED) + 1
    driver = StepDriver(worker.stream(), worker.limits)
    for chunk, run_ahead in ((1 << 20, 1), (7, 3)):
        sequences = [Sequence(prompt, COUNT, sampling=sampling) for sampling in samplings]
        sequences.append(Sequence(prompt, COUNT))
        outputs = await driver.run(sequences, chunk=chunk, run_ahead=run_ahead)
        assert outputs == [*expected, plain]
    resumed, rest = [], []
    for known, tokens, sampling in zip(range(1, 99, 9), expected, samplings, strict=False):
        resumed.append(Sequence(prompt + tokens[:known], COUNT - known, known, sampling))
        rest.append(tokens[known:])
    assert await driver.run(resumed, run_ahead=2) == rest


def _sampling(bias: dict[int, float] | None = None, **fields: Any) -> pb.SlotSampling:
    ids, biases = pack(list(bias or ())), np.array(list((bias or {}).values()), np.float32)
    return pb.SlotSampling(top_p=1.0, bias_ids=ids, biases=pack_floats(biases), **fields)


def _adjusted_tokens(
    model: PreTrainedModel, prompt: list[int], sampling: pb.SlotSampling
) -> list[int]:
    """Greedy tokens of the model's logits with biases and penalties."""
    biases = dict(zip(unpack(sampling.bias_ids), unpack_floats(sampling.biases), strict=True))
    output: list[int] = []
    for _ in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
        for token, bias in biases.items():
            logits[token] += bias
        for token in {*prompt, *output} if sampling.repetition_penalty else ():
            factor = sampling.repetition_penalty
            logits[token] *= 1 / factor if logits[token] > 0 else factor
        for token in set(output):
            logits[token] -= sampling.frequency_penalty * output.count(token)
            logits[token] -= sampling.presence_penalty
        output.append(int(logits.argmax()))
    return output
