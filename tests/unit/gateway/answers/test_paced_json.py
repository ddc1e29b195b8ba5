"""Large JSON in pieces."""

import pytest

from pagewire.gateway.answers.paced_json import paced_logprobs
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.completions import CompletionFormatter
from pagewire.gateway.api.formatting import Envelope, Formatter, json_utf8
from pagewire.gateway.generation.logprob_log import CandidateReader, LogprobLog
from pagewire.gateway.generation.pacer import Pacer
from pagewire.packing import pack, pack_floats
from pagewire.v1 import inference_pb2 as pb


@pytest.mark.parametrize(
    "formatter",
    [
        CompletionFormatter(Envelope("cmpl", "text_completion", "m")),
        ChatFormatter(Envelope("chatcmpl", "chat.completion", "m")),
    ],
)
async def test_log_probabilities_in_pieces_equal_those_in_one(formatter: Formatter) -> None:
    logs = LogprobLog(), LogprobLog()
    for number in range(75):
        message = pb.MultiplexResponse(
            candidate_ids=pack([number, 1, 2]),
            candidate_logprobs=pack_floats([-0.5, -1.0, -number]),  # type: ignore[arg-type]
            candidate_sizes=[2, 1, 1],
            candidate_bytes="\xe9xy".encode(),
        )
        for log in logs:
            log.extend(CandidateReader(message).take(1, 3))
    pieces = await paced_logprobs(formatter, [logs[0]], Pacer())
    assert "".join(pieces) == json_utf8(formatter.logprobs(logs[1].take()))
    assert logs[0].waiting == 0
