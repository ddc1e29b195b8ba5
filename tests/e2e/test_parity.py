"""The worker generates what transformers generates: every family, however a batch is cut."""

import random
from pathlib import Path

import pytest

from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from support.step_driver import Sequence, StepDriver, local_worker
from support.tiny_models import VARIANTS, VOCAB, greedy_tokens, save_model

LENGTHS = (1, 5, 16, 33, 80)
COUNT = 64


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS)
async def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    model = save_model(tmp_path, variant)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)

        whole = await driver.run([Sequence(prompt, COUNT) for prompt in prompts()])
        assert whole == expected

        chunked = [Sequence(prompt, COUNT) for prompt in prompts()]
        assert await driver.run(chunked, chunk=7, run_ahead=3) == expected

        resumed = [
            Sequence(prompt + tokens[:20], COUNT - 20, generated=20)
            for prompt, tokens in zip(prompts(), expected, strict=True)
        ]
        assert await driver.run(resumed, chunk=50) == [tokens[20:] for tokens in expected]


async def test_a_sequence_that_starts_with_a_copied_block(tmp_path: Path) -> None:
    """It shares a full block, has the next one copied while its owner writes on, and differs."""
    model = save_model(tmp_path, "llama")
    ours = prompts()[3]  # 33 tokens: two full blocks of 16 and a third
    theirs = [*ours[:-1], (ours[-1] + 1) % VOCAB]
    async with local_worker(tmp_path, block_size=24) as worker:
        stream = worker.stream()
        plain = pb.SlotSampling(top_p=1.0)
        first = pb.SequenceStart(slot=0, token_ids=pack(ours), blocks=pack([3, 4]), sampling=plain)
        second = pb.SequenceStart(
            slot=1,
            token_ids=pack(theirs),
            num_computed=32,
            blocks=pack([3, 7]),
            copied_block=4,
            sampling=plain,
        )
        steps = [
            pb.Step(starts=[first], prefill_slots=pack([0]), prefill_counts=pack([33])),
            pb.Step(decode_slots=pack([0])),
            pb.Step(starts=[second], prefill_slots=pack([1]), prefill_counts=pack([1])),
            *(pb.Step(decode_slots=pack([0, 1])) for _ in range(8)),
        ]
        outputs: dict[int, list[int]] = {0: [], 1: []}
        rows = [[0], [0], [0, 1], *([[0, 1]] * 8)]
        for number, (step, slots) in enumerate(zip(steps, rows, strict=True), 1):
            step.step = number
            await stream.send(step)
            result = await stream.receive()
            assert not result.errors
            for slot, token in zip(slots, unpack(result.token_ids).tolist(), strict=True):
                outputs[slot].append(token)
    assert outputs[0] == greedy_tokens(model, ours, 11)
    assert outputs[1] == greedy_tokens(model, theirs, 9)
    assert outputs[0][:9] != outputs[1]
