"""Steps for a sequence that starts with a copy of another sequence's last block."""

from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from support.models.step_driver import LocalWorker

BLOCK_SIZE = 32


async def run_copied_start(
    worker: LocalWorker, ours: list[int], theirs: list[int]
) -> tuple[list[int], list[int]]:
    """11 greedy tokens of `ours` and 9 of `theirs`, which differ in the last token only.

    The second sequence shares the first's full block of 32 tokens and starts with a copy of its
    next block, in which the first has written more by then. Both lists have 34 to 53 tokens.
    """
    stream = worker.stream()
    plain, shared = pb.SlotSampling(top_p=1.0), len(theirs) - 1
    first = pb.SequenceStart(slot=0, token_ids=pack(ours), blocks=pack([3, 4]), sampling=plain)
    second = pb.SequenceStart(
        slot=1,
        token_ids=pack(theirs),
        num_computed=shared,
        blocks=pack([3, 7]),
        copied_block=4,
        sampling=plain,
    )
    steps = [
        pb.Step(starts=[first], prefill_slots=pack([0]), prefill_counts=pack([len(ours)])),
        pb.Step(decode_slots=pack([0])),
        pb.Step(starts=[second], prefill_slots=pack([1]), prefill_counts=pack([1])),
        *(pb.Step(decode_slots=pack([0, 1])) for _ in range(8)),
    ]
    rows = [[0], [0], [0, 1], *([[0, 1]] * 8)]
    outputs: tuple[list[int], list[int]] = ([], [])
    for number, (step, slots) in enumerate(zip(steps, rows, strict=True), 1):
        step.step = number
        await stream.send(step)
        result = await stream.receive()
        assert not result.errors
        for slot, token in zip(slots, unpack(result.token_ids).tolist(), strict=True):
            outputs[slot].append(token)
    return outputs
