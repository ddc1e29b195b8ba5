"""Step messages whose arrays are malformed."""

import pytest

from pagewire.errors import Code, RequestError
from pagewire.packing import pack
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.step import (
    decode_step,
)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.Step(decode_slots=b"abc"), "decode_slots has 3 bytes"),
        (pb.Step(append_slots=pack([1, 2]), append_blocks=pack([1])), "append_blocks has 1 values"),
        (pb.Step(prefill_slots=pack([1])), "prefill_counts has 0 values and prefill_slots 1"),
        (pb.Step(starts=[pb.SequenceStart(token_ids=b"1")]), "starts.token_ids has 1 bytes"),
    ],
)
def test_arrays_of_a_message_must_be_well_formed(message: pb.Step, words: str) -> None:
    with pytest.raises(RequestError) as error:
        decode_step(message)
    assert error.value.code == Code.INVALID_ARGUMENT
    assert words in error.value.message


def test_copies_whose_lists_are_not_parallel_are_refused() -> None:
    message = pb.Step(step=1, saved_blocks=pack([1, 2]), saved_host_blocks=pack([0]))
    with pytest.raises(RequestError, match="saved_host_blocks has 1 values and saved_blocks 2"):
        decode_step(message)
    with pytest.raises(RequestError, match="loaded_blocks has 1 values and loaded_host_blocks 0"):
        decode_step(pb.Step(step=1, loaded_blocks=pack([1])))
