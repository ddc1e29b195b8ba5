"""Log probabilities: their sum over several attempts, and how they are read."""

import math

import numpy as np
import pytest

from pagewire.errors import Code
from pagewire.gateway.api.formatting import json_logprob
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import CandidateBlock, CandidateReader, LogprobLog
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.packing import pack, pack_floats
from pagewire.v1 import inference_pb2 as pb


def generation() -> Generation:
    request = pb.GenerateRequest(request_id="r", logprobs=0)
    return Generation(request, 0, 0, UpdateQueue(), eager=True)


def block(*tokens: tuple[float, bytes]) -> CandidateBlock:
    """Tokens without other candidates, as a scheduler sends them."""
    message = pb.MultiplexResponse(
        candidate_ids=pack([7] * len(tokens)),
        candidate_logprobs=pack_floats(np.array([value for value, _ in tokens], np.float32)),
        candidate_sizes=[len(data) for _, data in tokens],
        candidate_bytes=b"".join(data for _, data in tokens),
    )
    return CandidateReader(message).take(len(tokens), 1)


def receive(run: Generation, *logprobs: float) -> None:
    assert run.logprobs is not None
    run.logprobs.extend(block(*[(logprob, b"x") for logprob in logprobs]))
    run.extend(pack([7] * len(logprobs)), b"", 0.0)


def test_the_sum_covers_all_attempts() -> None:
    run = generation()
    run.next_attempt()
    receive(run, -0.5, -0.25)
    again = pb.GenerateRequest.FromString(run.next_attempt())
    assert again.HasField("logprobs")
    assert list(again.resume_token_ids) == [7, 7]
    receive(run, -2.0)
    run.end(pb.Finish(reason=pb.FINISH_REASON_STOP, cumulative_logprob=-2.0))
    assert run.finish is not None
    assert run.finish.cumulative_logprob == -2.75


def test_missing_log_probabilities_are_a_failure() -> None:
    run = generation()
    receive(run, -0.5)
    run.extend(pack([8]), b"", 0.0)
    run.end(pb.Finish(reason=pb.FINISH_REASON_STOP))
    assert run.failure is not None
    assert run.failure.code is Code.INTERNAL


def test_offsets_count_characters_not_bytes() -> None:
    log = LogprobLog()
    smiley = "🙂".encode()
    pieces = [b"a", smiley[:1], smiley[1:], "é".encode(), b" b"]
    log.extend(block(*[(-1.0, piece) for piece in pieces[:2]]))
    log.extend(block(*[(-1.0, piece) for piece in pieces[2:]]))
    assert [each.offset for each in log.take()] == [0, 1, 1, 2, 3]
    assert log.take() == []


@pytest.mark.parametrize(
    ("logprob", "shown"), [(-math.inf, -9999.0), (-1e9, -9999.0), (-2.5, -2.5)]
)
def test_json_has_no_infinity(logprob: float, shown: float) -> None:
    assert json_logprob(logprob) == shown


def test_take_returns_whole_blocks() -> None:
    log = LogprobLog()
    for _ in range(3):
        log.extend(block((-1.0, b"a"), (-2.0, b"b")))
    assert (log.count, log.waiting, log.total) == (6, 6, -9.0)
    assert [each.token.text for each in log.take(3)] == ["a", "b", "a", "b"]
    assert log.waiting == 2
    assert [(each.token.logprob, each.offset) for each in log.take()] == [(-1.0, 4), (-2.0, 5)]
    assert log.take(5) == []
