"""Decode steps with prefix groups on a GPU return the same tokens as for each sequence alone."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from support.models.step_driver import LocalStream, local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

COUNT = 40
OUTER, INNER = 8, 12  # blocks shared by all, and by the last three
MEMBERS = range(1, 7)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_grouped_decodes_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    model = save_model(tmp_path, variant)
    generator = random.Random(5)

    def draw(count: int) -> list[int]:
        return [generator.randrange(VOCAB) for _ in range(count)]

    outer, inner = draw(16 * OUTER), draw(16 * (INNER - OUTER))
    prompts = [outer + inner + draw(3)]
    prompts += [outer + (inner if slot > 3 else []) + draw(5 + slot) for slot in MEMBERS]
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts]

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 9, "num_blocks": 128}
        async with local_worker(tmp_path, **settings) as worker:
            assert worker.loaded.backend.prefix_groups
            outputs = await generate(worker.stream(), prompts)
            assert outputs == expected
            assert not worker.fatal

    asyncio.run(check())


async def generate(stream: LocalStream, prompts: list[list[int]]) -> list[list[int]]:
    """Slot 0 computes the prefixes, the others start with its blocks, and all decode."""
    blocks: Iterator[int] = iter(range(1, 128))
    tables = [[next(blocks) for _ in range(20)]]
    for slot in MEMBERS:
        shared = INNER if slot > 3 else OUTER
        tables.append(tables[0][:shared] + [next(blocks) for _ in range(16 - shared + 1)])
    outputs: list[list[int]] = [[] for _ in prompts]

    def start(slot: int, computed: int) -> pb.SequenceStart:
        return pb.SequenceStart(
            slot=slot,
            token_ids=pack(prompts[slot]),
            num_computed=computed,
            blocks=pack(tables[slot]),
            sampling=pb.SlotSampling(top_p=1.0),
        )

    async def run(step: pb.Step, slots: list[int]) -> None:
        await stream.send(step)
        answer = await stream.receive()
        assert not answer.errors
        for slot, token in zip(slots, unpack(answer.token_ids).tolist(), strict=True):
            outputs[slot].append(token)

    first = pb.Step(step=1, starts=[start(0, 0)], prefill_slots=pack([0]))
    first.prefill_counts = pack([len(prompts[0])])
    await run(first, [0])
    computed = {slot: 16 * (INNER if slot > 3 else OUTER) for slot in MEMBERS}
    second = pb.Step(step=2, starts=[start(slot, computed[slot]) for slot in MEMBERS])
    second.prefill_slots = pack(list(MEMBERS))
    second.prefill_counts = pack([len(prompts[s]) - computed[s] for s in MEMBERS])
    second.decode_slots = pack([0])
    await run(second, [0, *MEMBERS])
    all_slots = [0, *MEMBERS]
    third = pb.Step(step=3, decode_slots=pack(all_slots))
    inner = [0, 4, 5, 6]
    third.group_sizes = pack([len(all_slots), len(inner)])
    third.group_blocks, third.group_slots = pack([OUTER, INNER]), pack(all_slots + inner)
    await run(third, all_slots)
    for number in range(4, COUNT + 2):
        # Slot 0 began a step earlier and ends first.
        if number == COUNT + 1:
            all_slots = list(MEMBERS)
        step = pb.Step(step=number)
        if number == COUNT + 1:
            step.decode_slots = pack(all_slots)
        await run(step, all_slots)
    return outputs
