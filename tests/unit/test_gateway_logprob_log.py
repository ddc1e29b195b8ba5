"""Log probabilities of one generation, over several attempts."""

import math

import pytest

from pagewire.errors import Code
from pagewire.gateway.generation import Generation, Mailbox
from pagewire.gateway.logprobs import Candidate, LogprobLog
from pagewire.gateway.reply import json_logprob
from pagewire.packing import pack
from pagewire.v1 import inference_pb2 as pb


def generation() -> Generation:
    request = pb.GenerateRequest(request_id="r", logprobs=0)
    return Generation(request, 0, 0, Mailbox(), eager=True)


def receive(run: Generation, *logprobs: float) -> None:
    assert run.logprobs is not None
    run.logprobs.extend([[Candidate(7, logprob, b"x")] for logprob in logprobs])
    run.extend(pack([7] * len(logprobs)), b"", 0.0)


def test_the_sum_is_over_all_attempts() -> None:
    run = generation()
    run.next_attempt()
    receive(run, -0.5, -0.25)
    again = run.next_attempt()
    assert again.HasField("logprobs")
    assert list(again.resume_token_ids) == [7, 7]
    receive(run, -2.0)
    run.end(pb.Finish(reason=pb.FINISH_REASON_STOP, cumulative_logprob=-2.0))
    assert run.finish is not None
    assert run.finish.cumulative_logprob == -2.75


def test_an_end_without_all_of_them_is_a_failure() -> None:
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
    log.extend([[Candidate(0, -1.0, piece)] for piece in pieces[:2]])
    log.extend([[Candidate(0, -1.0, piece)] for piece in pieces[2:]])
    assert [news.offset for news in log.take()] == [0, 1, 1, 2, 3]
    assert log.take() == []


@pytest.mark.parametrize(
    ("logprob", "shown"), [(-math.inf, -9999.0), (-1e9, -9999.0), (-2.5, -2.5)]
)
def test_json_has_no_infinity(logprob: float, shown: float) -> None:
    assert json_logprob(logprob) == shown
