"""The pages of a slow client."""

import numpy as np

from pagewire.packing import pack_floats
from pagewire.rpc.protocol import MAX_MESSAGE_BYTES
from pagewire.scheduler.requests.delivery import PAGE_LARGE_BYTES, DeltaBuffer
from pagewire.v1 import inference_pb2 as pb


def test_vectors_of_a_client_that_lags_come_in_several_messages() -> None:
    vector = pack_floats(np.ones(4096, np.float32))
    count = 2 * MAX_MESSAGE_BYTES // len(vector)
    buffer = DeltaBuffer()
    for stream in range(count):
        buffer.add_finish(stream, pb.Finish(reason=pb.FINISH_REASON_STOP, pooled=vector), 0)
    assert not buffer.read.is_set(), "no request should be taken until the client has read some"
    streams = []
    while buffer.ready.is_set():
        message = buffer.take()
        assert message.ByteSize() < 2 * PAGE_LARGE_BYTES
        streams += [end.stream for end in message.finished]
    assert streams == list(range(count))
    assert buffer.read.is_set()
