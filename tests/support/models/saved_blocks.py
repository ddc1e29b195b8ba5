"""Steps that save a sequence's KV blocks to host memory and load them again."""

from pagewire.packing import pack, unpack
from pagewire.v1 import worker_pb2 as pb
from support.models.step_driver import LocalWorker, Stream

COUNT = 8
SHARED = 32  # tokens in two blocks of 16


def start_step(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> pb.Step:
    """A step that starts a sequence, computes all tokens but the first `computed`, and samples."""
    start = pb.SequenceStart(
        slot=slot,
        token_ids=pack(tokens),
        num_computed=computed,
        blocks=pack(blocks),
        sampling=pb.SlotSampling(top_p=1.0),
    )
    return pb.Step(
        starts=[start],
        prefill_slots=pack([slot]),
        prefill_counts=pack([len(tokens) - computed]),
        decode_slots=b"",
    )


async def run_saved_and_loaded(
    worker: LocalWorker, ours: list[int], theirs: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Greedy tokens of three sequences.

    The first continues `ours` from blocks that were saved, overwritten by `theirs` in the same
    step, and loaded to other places. The second is `theirs`. The third continues `ours` from
    blocks that were never written, so its tokens are wrong. Both lists have 33 to 41 tokens.
    """
    stream = worker.stream()
    first = start_step(0, ours, [1, 2, 3])
    second = start_step(1, theirs, [2, 1, 4])
    second.saved_blocks, second.saved_host_blocks = pack([1, 2]), pack([5, 3])
    third = start_step(2, ours, [7, 9, 11], computed=SHARED)
    third.loaded_host_blocks, third.loaded_blocks = pack([3, 5]), pack([9, 7])
    # This step saves and loads.
    third.saved_blocks, third.saved_host_blocks = pack([4]), pack([0])
    wrong = start_step(3, ours, [8, 10, 12], computed=SHARED)
    wrong.loaded_host_blocks, wrong.loaded_blocks = pack([0]), pack([13])
    outputs = []
    number = 0
    for step in (first, second, third, wrong):
        slot = step.starts[0].slot
        output = []
        for each in (step, pb.Step(decode_slots=pack([slot])), *[pb.Step()] * (COUNT - 2)):
            number += 1
            output.append(await _token(stream, each, number))
        outputs.append(output)
    return outputs[2], outputs[1], outputs[3]


async def _token(stream: Stream, step: pb.Step, number: int) -> int:
    sent = pb.Step()
    sent.CopyFrom(step)
    sent.step = number
    await stream.send(sent)
    result = await stream.receive()
    assert not result.errors
    (token,) = unpack(result.token_ids).tolist()
    return int(token)
