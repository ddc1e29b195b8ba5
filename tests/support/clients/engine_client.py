"""A client of an engine in the same process."""

from itertools import count

from pagewire.packing import unpack_unsigned
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.incoming_request import IncomingRequest
from pagewire.v1 import inference_pb2 as pb

_streams = count(1)


async def generate(engine: Engine, prompt: str, tokens: int) -> bytes:
    """The text of a greedy answer; checks that each token arrives once and in order."""
    message = pb.GenerateRequest(prompt=prompt, sampling=pb.SamplingParams(temperature=0))
    message.stop.max_tokens, message.stop.ignore_eos = tokens, True
    buffer, text, received = DeltaBuffer(), b"", 0
    engine.intake.submit(IncomingRequest.of(message), buffer, next(_streams))
    while True:
        await buffer.ready.wait()
        news = buffer.take()
        indices = unpack_unsigned(news.indices).tolist()
        assert indices == list(range(received, received + len(indices)))
        text += news.text
        received += len(news.token_ids) // 4
        if news.finished:
            assert news.finished[0].finish.reason == pb.FINISH_REASON_LENGTH
            assert received == tokens
            return text
