"""How generations end, and when they become suspects."""

import pytest

from pagewire.errors import Code, deadline_passed
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.prompt_log import PromptBudget, PromptLog, PromptWishes
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.packing import pack
from pagewire.suspicion import Loss
from pagewire.v1 import inference_pb2 as pb
from support.scripted.routing import scripted_generation


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (pb.Finish(reason=pb.FINISH_REASON_ERROR, error=pb.Error(code=8, message="full")), 8),
        (pb.Finish(reason=pb.FINISH_REASON_ERROR, error=pb.Error(code=99)), Code.INTERNAL),
        (pb.Finish(), Code.INTERNAL),
    ],
)
async def test_an_end_with_an_error_or_without_a_reason_is_a_failure(
    finish: pb.Finish, code: int
) -> None:
    run = scripted_generation()
    run.end(finish)
    assert run.failure is not None
    assert run.failure.code == code
    assert await run.updates.take() == [run]


def test_a_deadline_that_has_passed_is_the_one_that_the_client_gave() -> None:
    """Schedulers receive the remaining time, and name that in their error."""
    run = Generation(pb.GenerateRequest(deadline_ms=60_000), 0, 0, UpdateQueue(), eager=True)
    sent = pb.GenerateRequest.FromString(run.next_attempt()).deadline_ms
    late = deadline_passed(sent - 1)
    error = pb.Error(code=late.code, message=late.message, field=late.field)
    run.end(pb.Finish(reason=pb.FINISH_REASON_ERROR, error=error))
    assert run.failure == deadline_passed(60_000)


def test_a_token_clears_suspicion() -> None:
    run = scripted_generation()
    for losses in (1, 2, 3):
        run.record_loss(Loss("process", True))
        assert run.losses == losses
    run.extend(b"\1\0\0\0", b"x", 0.0)
    assert run.losses == 0
    run.record_loss(Loss("process", True))
    assert run.losses == 1


def test_a_later_attempt_does_not_ask_for_the_prompt_again() -> None:
    request = pb.GenerateRequest(request_id="r", return_prompt_token_ids=True)
    prompt = PromptLog(PromptWishes(ids=True), PromptBudget(0, 1))
    run = Generation(request, 0, 0, UpdateQueue(), eager=True, prompt=prompt)
    assert pb.GenerateRequest.FromString(run.next_attempt()).return_prompt_token_ids
    assert pb.GenerateRequest.FromString(run.next_attempt()).return_prompt_token_ids, "it was lost"
    run.receive_prompt(pb.PromptOutput(token_ids=pack([4, 5])))
    assert prompt.token_ids == [4, 5]
    assert not pb.GenerateRequest.FromString(run.next_attempt()).return_prompt_token_ids
