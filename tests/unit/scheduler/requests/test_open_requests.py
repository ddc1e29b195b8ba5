"""Open requests: how their ends reach the clients."""

import numpy as np
import pytest

from pagewire.scheduler.core.sequence import Sampling, Sequence, State
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.open_requests import OpenRequests
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb

GREEDY = Sampling(temperature=0.0, seed=0, min_tokens=0)


@pytest.mark.parametrize(
    ("ended_by", "reason"),
    [
        (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP),
        (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_ABORT),
    ],
)
def test_a_stop_string_in_held_text_ends_a_request_at_its_limit(
    byte_fallback: Tokenizer, ended_by: int, reason: int
) -> None:
    """Byte-fallback tokens have no text before the next token, or the end."""
    buffer, open_requests = DeltaBuffer(), OpenRequests()
    request = Request("id", buffer, stream=1, received=0.0, arrival=1)
    request.sequence = Sequence(np.array([1], np.int32), GREEDY, 4, (), 1)
    request.text = TextStream(byte_fallback.detokenizer(), ("é",), include_stop=False)
    open_requests.add(request)
    fed = [request.text.feed(token) for token in byte_fallback.encode("aé").tolist()]
    assert "é" not in "".join(fed)
    open_requests.close(request, State.COMPLETED, pb.Finish(reason=ended_by))
    finish = buffer.take().finished[0].finish
    assert finish.reason == reason
    assert finish.stop_string == ("é" if reason == pb.FINISH_REASON_STOP else "")
    assert open_requests.all_closed.is_set()
