"""The charges of requests to their keys: estimates while they run, then the used tokens."""

import pytest

from pagewire.auth.accounts import Account
from pagewire.auth.keys import ApiKey
from pagewire.auth.rate_limits import RateLimits, TokenBucket
from pagewire.errors import Code, RequestError
from pagewire.gateway.api.formatting import usage as usage_body
from pagewire.gateway.api.job import Job
from pagewire.gateway.auth.charge import Charge
from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.packing import pack
from pagewire.v1 import inference_pb2 as pb


def account(**limits: int) -> Account:
    return Account(ApiKey("ada", b"d", "ada", RateLimits(**limits)), 0.0)


def job(prompts: int = 1, max_tokens: int | None = 10, n: int = 1) -> Job:
    stop = pb.StopConditions(max_tokens=max_tokens)
    requests = [pb.GenerateRequest(stop=stop) for _ in range(prompts * n)]
    common = [CommonFields(tokens=10)] * prompts
    return Job(requests, common, n, n, None, False, False, False)  # type: ignore[arg-type]


def admit(holder: Account, wanted: Job, now: float) -> Charge:
    return Charge(holder.begin_request(now), wanted, 100, lambda: now)


def refusal(holder: Account, wanted: Job, now: float) -> tuple[int, int]:
    visit = holder.begin_request(now)
    with pytest.raises(RequestError) as caught:
        Charge(visit, wanted, 100, lambda: now)
    visit.end(0, now)
    error = ApiError.of(caught.value)
    return error.status, int((error.headers or {}).get("retry-after", 0))


def seconds_until_accepted(holder: Account, now: float) -> int:
    """The `retry-after` of a request that is refused by its head."""
    with pytest.raises(RequestError) as caught:
        holder.begin_request(now)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    return int(caught.value.retry_after or 0)


def left(bucket: TokenBucket | None, now: float) -> float:
    assert bucket is not None
    return bucket.level(now)


def generation(request: pb.GenerateRequest, prompt: int = 0, sent: bool = True) -> Generation:
    made = Generation(request, 0, prompt, UpdateQueue(), False)
    if sent:
        made.next_attempt()
    return made


def test_requests_per_minute_are_limited() -> None:
    holder = account(requests_per_minute=2)
    holder.begin_request(0.0)
    holder.begin_request(0.0)
    assert seconds_until_accepted(holder, 0.0) == 30
    holder.begin_request(30.0)
    headers = dict(holder.headers(30.0))
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "60.000s"


def test_an_estimate_is_reserved_and_then_replaced() -> None:
    holder = account(tokens_per_minute=60)
    charge = admit(holder, job(max_tokens=40), 0.0)  # 10 for the prompt, 40 for the output
    assert refusal(holder, job(max_tokens=10), 0.0) == (429, 10)
    run = generation(pb.GenerateRequest())
    run.prompt_tokens = 7
    run.extend(pack([1, 2, 3]), b"", 0.0)
    charge.follow([run])
    charge.close()
    assert left(holder.tokens, 0.0) == 50.0
    # A full bucket admits more than a minute's tokens. The key has a debt afterwards.
    admit(holder, job(max_tokens=1000), 60.0).close()
    assert left(holder.tokens, 60.0) == 60.0


def test_a_request_without_max_tokens_reserves_what_is_left() -> None:
    """But at most the number of tokens that the model's length allows."""
    holder = account(tokens_per_minute=110)
    first = admit(holder, job(max_tokens=None), 0.0)
    assert left(holder.tokens, 0.0) == 10.0
    second = admit(holder, job(max_tokens=None), 0.0)
    assert left(holder.tokens, 0.0) == 0.0
    assert seconds_until_accepted(holder, 0.0) == 1
    first.close()
    second.close()
    assert left(holder.tokens, 0.0) == 110.0


def test_a_prompt_with_several_choices_counts_once() -> None:
    holder = account(tokens_per_minute=600)
    wanted = job(max_tokens=5, n=3)
    charge = admit(holder, wanted, 0.0)
    assert left(holder.tokens, 0.0) == 600 - 10 - 3 * 5
    runs = [generation(request) for request in wanted.requests]
    charge.follow(runs)
    for run in runs:
        run.prompt_tokens = 9
        run.extend(pack([1] * 5), b"", 0.0)
        usage = pb.Usage(prompt_tokens=9, completion_tokens=5)
        run.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    charge.close()
    assert holder.charged == 9 + 3 * 5 == usage_body(runs)["total_tokens"]


@pytest.mark.parametrize(
    ("ended", "charged"), [("completed", 9 + 25), ("failed", 0), ("aborted", 10 + 2 * 40)]
)
def test_the_cost_of_a_beam_search(ended: str, charged: int) -> None:
    holder, wanted = account(tokens_per_minute=60), job(max_tokens=40)
    wanted.requests[0].beam_search.width = 2
    charge = admit(holder, wanted, 0.0)
    run = generation(wanted.requests[0])
    charge.follow([run])
    if ended == "completed":
        usage = pb.Usage(prompt_tokens=9, completion_tokens=25)
        run.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    elif ended == "failed":
        run.fail(RequestError(Code.UNAVAILABLE, "no worker"))
    charge.close()
    assert holder.charged == charged


@pytest.mark.parametrize(
    ("report", "charged"),
    [
        (pb.Finish(queue_seconds=0.1, usage=pb.Usage(prompt_tokens=8, completion_tokens=2)), 10),
        (pb.Finish(usage=pb.Usage(prompt_tokens=8)), 0),
        (None, 10),
    ],
    ids=["it ran", "it was queued", "its scheduler is lost"],
)
def test_an_aborted_request_costs_what_its_scheduler_reports(
    report: pb.Finish | None, charged: int
) -> None:
    """Until then its prompt costs the estimate, so that aborted prompts are not free."""
    holder, wanted = account(tokens_per_minute=600), job()
    charge = admit(holder, wanted, 0.0)
    run = generation(wanted.requests[0])
    charge.follow([run])
    charge.close()
    assert holder.charged == 10
    if report is not None:
        report.reason = pb.FINISH_REASON_ABORT
        run.record_usage(report)
        run.record_usage(report)
    assert holder.charged == charged
    assert left(holder.tokens, 0.0) == 600 - charged


def test_a_request_that_was_never_sent_costs_nothing() -> None:
    holder, wanted = account(tokens_per_minute=600), job()
    charge = admit(holder, wanted, 0.0)
    charge.follow([generation(wanted.requests[0], sent=False)])
    charge.close()
    assert holder.charged == 0


def test_concurrent_prompts_are_limited() -> None:
    holder = account(max_concurrent=3)
    first = admit(holder, job(2), 0.0)
    assert refusal(holder, job(2), 0.0) == (429, 1)
    assert refusal(holder, job(4), 0.0) == (400, 0)
    first.close()
    admit(holder, job(3), 0.0)


def test_a_request_is_refused_by_its_head_if_no_body_would_be_accepted() -> None:
    holder = account(requests_per_minute=1, tokens_per_minute=60, max_concurrent=2)
    admit(holder, job(2), 0.0).close()
    assert seconds_until_accepted(holder, 0.0) == 60
    admit(holder, job(2, max_tokens=1000), 60.0)
    with pytest.raises(RequestError, match="this API key may run 2 prompts at once and 2 are"):
        holder.begin_request(120.0)
    holder.begin_request(120.0, generates=False)  # it needs no tokens
    in_debt = account(tokens_per_minute=60)
    large = admit(in_debt, job(max_tokens=110), 0.0)
    assert seconds_until_accepted(in_debt, 0.0) == 61
    large.close()
    in_debt.begin_request(0.0)


def test_a_request_counts_from_its_head_on_even_if_it_is_refused_later() -> None:
    holder = account(requests_per_minute=5, tokens_per_minute=30)
    admit(holder, job(), 0.0)
    assert refusal(holder, job(), 0.0)[0] == 429
    assert (left(holder.requests, 0.0), left(holder.tokens, 0.0)) == (3.0, 10.0)
    holder.begin_request(0.0).end(0, 0.0)
    assert (left(holder.requests, 0.0), left(holder.tokens, 0.0)) == (2.0, 10.0)
    assert (holder.running, holder.open) == (1, 1)


def test_a_reload_keeps_what_a_key_has_used() -> None:
    """Also under another limit: a larger number in the key file does not reset the use."""
    holder = account(requests_per_minute=2, tokens_per_minute=100)
    charge = admit(holder, job(), 0.0)
    holder.renew(ApiKey("ada", b"d", "ada", RateLimits(3, 500)), 0.0)
    assert (left(holder.requests, 0.0), left(holder.tokens, 0.0)) == (2.0, 480.0)
    charge.close()
    assert (holder.running, left(holder.tokens, 0.0)) == (0, 500.0)


def test_a_new_limit_refunds_nothing_to_requests_that_were_open() -> None:
    holder = account()
    charge = admit(holder, job(), 0.0)
    holder.renew(ApiKey("ada", b"d", "ada", RateLimits(tokens_per_minute=100)), 0.0)
    admit(holder, job(max_tokens=80), 0.0)
    charge.close()
    assert left(holder.tokens, 0.0) == 10.0


def test_a_report_costs_the_same_in_a_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway once read all 1,024 aborted generations at every report."""
    prompts, reads = 500, 0
    used = Generation.used_tokens.fget  # type: ignore[attr-defined]

    def counted(generation: Generation) -> int:
        nonlocal reads
        reads += 1
        return used(generation)  # type: ignore[no-any-return]

    monkeypatch.setattr(Generation, "used_tokens", property(counted))
    holder, wanted = account(), job(prompts=prompts)
    charge = admit(holder, wanted, 0.0)
    runs = [generation(request, prompt) for prompt, request in enumerate(wanted.requests)]
    charge.follow(runs)
    charge.close()
    assert holder.charged == prompts * 10  # the estimates of the prompts
    usage = pb.Usage(prompt_tokens=4, completion_tokens=2)
    for run in runs:
        reason = pb.FINISH_REASON_ABORT
        run.record_usage(pb.Finish(reason=reason, queue_seconds=0.1, usage=usage))
    assert holder.charged == prompts * 6
    assert reads == 2 * prompts
