"""API keys: files, digests, accounts of what they use."""

import hashlib
import json
from pathlib import Path

import pytest

from pagewire.auth.accounts import Account
from pagewire.auth.callers import Callers
from pagewire.auth.keys import ApiKey, KeyRing, entry_of, new_key, read_keys
from pagewire.auth.rate_limits import RateLimits, TokenBucket
from pagewire.errors import Code, RequestError
from pagewire.gateway.api import formatting as reply
from pagewire.gateway.api.job import Job
from pagewire.gateway.auth.bill import Bill
from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation.generation import Generation, Mailbox
from pagewire.gateway.generation.input import Input
from pagewire.packing import pack
from pagewire.v1 import inference_pb2 as pb

DIGEST = "ab" * 32


def test_a_made_key_opens_and_its_file_does_not_hold_it(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    limits = RateLimits(requests_per_minute=5, max_concurrent=2)
    file.write_text(entry_of("ada", key, "lab", limits) + "\n")
    assert key not in file.read_text()
    ring = read_keys(str(file), "")
    assert ring is not None
    found = ring.find(key.encode())
    assert found is not None
    assert (found.name, found.tenant, found.limits) == ("ada", "lab", limits)
    for other in (key[:-1], key + "x", "", DIGEST, new_key()):
        assert ring.find(other.encode()) is None
    assert ring.find(b"\xff\xfe") is None


def test_nothing_of_a_key_stays_in_memory() -> None:
    key = new_key()
    ring = read_keys(None, f"ops={key}")
    assert ring is not None
    found = ring.find(key.encode())
    assert found is not None
    assert found.name == "ops"
    assert found.digest == hashlib.sha256(key.encode()).digest()
    assert key not in repr(found)
    assert key not in repr(vars(ring))


def test_keys_of_file_and_environment_add_up(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(3)]
    file = tmp_path / "keys.json"
    digest = hashlib.sha256(keys[0].encode()).hexdigest()
    file.write_text(json.dumps([{"name": "file", "sha256": digest}]))
    ring = read_keys(str(file), f"{keys[1]}, second={keys[2]},")
    assert ring is not None
    assert ring.names == {"file", "environment-1", "second"}
    assert all(ring.find(key.encode()) for key in keys)
    assert read_keys(None, "") is None


def test_keys_of_the_environment_may_end_in_padding() -> None:
    keys = [f"{new_key()}==", f"{new_key()}="]
    ring = read_keys(None, f"{keys[0]},named={keys[1]}")
    assert ring is not None
    assert ring.names == {"environment-1", "named"}
    assert all(ring.find(key.encode()) for key in keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a", "neither YAML nor JSON"),
        ("name: a", "must hold a list"),
        ("[]", "has no keys"),
        ("- a", "must be a mapping"),
        (f"- {{sha256: {DIGEST}}}", "name must be a text"),
        ("- {name: a}", "sha256 must be a text"),
        ("- {name: a, sha256: abc}", "not 64 hexadecimal digits"),
        (f"- {{name: a, sha256: {DIGEST}, rpm: 5}}", "unknown field 'rpm'"),
        (f"- {{name: a, sha256: {DIGEST}, requests_per_minute: 0}}", "at least 1"),
        (f"- {{name: a, sha256: {DIGEST}, tokens_per_minute: true}}", "at least 1"),
        (f"- {{name: a, sha256: {DIGEST}, tenant: ''}}", "tenant must be a text"),
        (f"- {{name: a, sha256: {DIGEST}}}\n- {{name: b, sha256: {DIGEST}}}", "twice"),
        (f"- {{name: a, sha256: {DIGEST}}}\n- {{name: a, sha256: {'cd' * 32}}}", "twice"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_keys(str(file), "")


def test_short_keys_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="fewer than 20") as caught:
        read_keys(None, "hunter2")
    assert "hunter2" not in str(caught.value)


def test_bucket_fills_at_its_rate_up_to_its_size() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.take(60, 0.0)
    assert bucket.seconds_until(1, 0.0) == 1.0
    assert bucket.seconds_until(1000, 0.0) == 60.0
    assert bucket.level(30.0) == 30.0
    assert bucket.level(1000.0) == 60.0
    bucket.take(90, 1000.0)
    assert bucket.level(1000.0) == -30.0
    assert bucket.seconds_until(1, 1000.0) == 31.0
    bucket.take(-500, 1000.0)
    assert bucket.level(1000.0) == 60.0


def account(**limits: int) -> Account:
    return Account(ApiKey("ada", b"d", "ada", RateLimits(**limits)), 0.0)


def job(prompts: int = 1, max_tokens: int | None = 10, n: int = 1) -> Job:
    stop = pb.StopConditions(max_tokens=max_tokens)
    requests = [pb.GenerateRequest(stop=stop) for _ in range(prompts * n)]
    common = [Input(tokens=10)] * prompts
    return Job(requests, common, n, n, None, False, False, False)  # type: ignore[arg-type]


def let_in(holder: Account, wanted: Job, now: float) -> Bill:
    return Bill(holder.begin_request(now), wanted, 100, lambda: now)


def refusal(holder: Account, wanted: Job, now: float) -> tuple[int, int]:
    visit = holder.begin_request(now)
    with pytest.raises(RequestError) as caught:
        Bill(visit, wanted, 100, lambda: now)
    visit.end(0, now)
    error = ApiError.of(caught.value)
    return error.status, int((error.headers or {}).get("retry-after", 0))


def refused_head(holder: Account, now: float) -> int:
    """The seconds after which to come back."""
    with pytest.raises(RequestError) as caught:
        holder.begin_request(now)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    return int(caught.value.retry_after or 0)


def left(bucket: TokenBucket | None, now: float) -> float:
    assert bucket is not None
    return bucket.level(now)


def generation(request: pb.GenerateRequest, prompt: int = 0, sent: bool = True) -> Generation:
    made = Generation(request, 0, prompt, Mailbox(), False)
    if sent:
        made.next_attempt()
    return made


def test_requests_a_minute() -> None:
    holder = account(requests_per_minute=2)
    holder.begin_request(0.0)
    holder.begin_request(0.0)
    assert refused_head(holder, 0.0) == 30
    holder.begin_request(30.0)
    headers = dict(holder.headers(30.0))
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "60.000s"


def test_tokens_are_reserved_and_then_settled() -> None:
    holder = account(tokens_per_minute=60)
    bill = let_in(holder, job(max_tokens=40), 0.0)  # 10 for the prompt, 40 for the output
    assert refusal(holder, job(max_tokens=10), 0.0) == (429, 10)
    run = generation(pb.GenerateRequest())
    run.prompt_tokens = 7
    run.extend(pack([1, 2, 3]), b"", 0.0)
    bill.follow([run])
    bill.close()
    assert left(holder.tokens, 0.0) == 50.0
    # More than a minute's worth is let in with a full bucket, and paid for afterwards.
    let_in(holder, job(max_tokens=1000), 60.0).close()
    assert left(holder.tokens, 60.0) == 60.0


def test_a_request_without_max_tokens_reserves_what_is_left() -> None:
    """At most what the model's length leaves; another one beside it would overdraw the key."""
    holder = account(tokens_per_minute=110)
    first = let_in(holder, job(max_tokens=None), 0.0)
    assert left(holder.tokens, 0.0) == 10.0
    second = let_in(holder, job(max_tokens=None), 0.0)
    assert left(holder.tokens, 0.0) == 0.0
    assert refused_head(holder, 0.0) == 1
    first.close()
    second.close()
    assert left(holder.tokens, 0.0) == 110.0


def test_the_choices_of_a_prompt_pay_for_it_once() -> None:
    holder = account(tokens_per_minute=600)
    wanted = job(max_tokens=5, n=3)
    bill = let_in(holder, wanted, 0.0)
    assert left(holder.tokens, 0.0) == 600 - 10 - 3 * 5
    runs = [generation(request) for request in wanted.requests]
    bill.follow(runs)
    for run in runs:
        run.prompt_tokens = 9
        run.extend(pack([1] * 5), b"", 0.0)
        usage = pb.Usage(prompt_tokens=9, completion_tokens=5)
        run.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    bill.close()
    assert holder.charged == 9 + 3 * 5 == reply.usage(runs)["total_tokens"]


@pytest.mark.parametrize(
    ("ended", "charged"), [("well", 9 + 25), ("badly", 0), ("given up", 10 + 2 * 40)]
)
def test_a_beam_search_is_paid_for(ended: str, charged: int) -> None:
    holder, wanted = account(tokens_per_minute=60), job(max_tokens=40)
    wanted.requests[0].beam_search.width = 2
    bill = let_in(holder, wanted, 0.0)
    run = generation(wanted.requests[0])
    bill.follow([run])
    if ended == "well":
        usage = pb.Usage(prompt_tokens=9, completion_tokens=25)
        run.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    elif ended == "badly":
        run.fail(RequestError(Code.UNAVAILABLE, "no worker"))
    bill.close()
    assert holder.charged == charged


@pytest.mark.parametrize(
    ("heard", "charged"),
    [
        (pb.Finish(queue_seconds=0.1, usage=pb.Usage(prompt_tokens=8, completion_tokens=2)), 10),
        (pb.Finish(usage=pb.Usage(prompt_tokens=8)), 0),
        (None, 10),
    ],
    ids=["it ran", "it waited", "its scheduler is lost"],
)
def test_what_was_given_up_is_settled_when_it_is_known(
    heard: pb.Finish | None, charged: int
) -> None:
    """Until then its prompt is taken at its estimate: leaving early computes no prompt for free."""
    holder, wanted = account(tokens_per_minute=600), job()
    bill = let_in(holder, wanted, 0.0)
    run = generation(wanted.requests[0])
    bill.follow([run])
    bill.close()
    assert holder.charged == 10
    if heard is not None:
        heard.reason = pb.FINISH_REASON_ABORT
        run.note_use(heard)
        run.note_use(heard)
    assert holder.charged == charged
    assert left(holder.tokens, 0.0) == 600 - charged


def test_what_was_never_sent_costs_nothing() -> None:
    holder, wanted = account(tokens_per_minute=600), job()
    bill = let_in(holder, wanted, 0.0)
    bill.follow([generation(wanted.requests[0], sent=False)])
    bill.close()
    assert holder.charged == 0


def test_prompts_at_once() -> None:
    holder = account(max_concurrent=3)
    first = let_in(holder, job(2), 0.0)
    assert refusal(holder, job(2), 0.0) == (429, 1)
    assert refusal(holder, job(4), 0.0) == (400, 0)
    first.close()
    let_in(holder, job(3), 0.0)


def test_a_head_is_refused_for_what_no_body_could_change() -> None:
    holder = account(requests_per_minute=1, tokens_per_minute=60, max_concurrent=2)
    let_in(holder, job(2), 0.0).close()
    assert refused_head(holder, 0.0) == 60
    let_in(holder, job(2, max_tokens=1000), 60.0)
    with pytest.raises(RequestError, match="this API key may run 2 prompts at once and 2 are"):
        holder.begin_request(120.0)
    holder.begin_request(120.0, generates=False)  # of no concern to those
    poor = account(tokens_per_minute=60)
    debt = let_in(poor, job(max_tokens=110), 0.0)
    assert refused_head(poor, 0.0) == 61
    debt.close()
    poor.begin_request(0.0)


def test_a_request_counts_from_its_head_on_whatever_becomes_of_it() -> None:
    holder = account(requests_per_minute=5, tokens_per_minute=30)
    let_in(holder, job(), 0.0)
    assert refusal(holder, job(), 0.0)[0] == 429
    assert (left(holder.requests, 0.0), left(holder.tokens, 0.0)) == (3.0, 10.0)
    holder.begin_request(0.0).end(0, 0.0)
    assert (left(holder.requests, 0.0), left(holder.tokens, 0.0)) == (2.0, 10.0)
    assert (holder.running, holder.open) == (1, 1)


def test_use_outlives_a_reload() -> None:
    """Under another limit, too: a key file with a larger number is no fresh budget."""
    holder = account(requests_per_minute=2, tokens_per_minute=100)
    bill = let_in(holder, job(), 0.0)
    holder.renew(ApiKey("ada", b"d", "ada", RateLimits(3, 500)), 0.0)
    assert (left(holder.requests, 0.0), left(holder.tokens, 0.0)) == (2.0, 480.0)
    bill.close()
    assert (holder.running, left(holder.tokens, 0.0)) == (0, 500.0)


def test_a_limit_that_is_new_gives_nothing_back_to_those_who_were_there() -> None:
    holder = account()
    bill = let_in(holder, job(), 0.0)
    holder.renew(ApiKey("ada", b"d", "ada", RateLimits(tokens_per_minute=100)), 0.0)
    let_in(holder, job(max_tokens=80), 0.0)
    bill.close()
    assert left(holder.tokens, 0.0) == 10.0


def test_a_key_that_is_removed_and_added_again_has_used_what_it_had_used() -> None:
    key, now = new_key(), 0.0
    digest = hashlib.sha256(key.encode()).digest()
    ada = ApiKey("ada", digest, "ada", RateLimits(requests_per_minute=2))
    bob = ApiKey("bob", b"b" * 32, "bob", RateLimits())
    there = [ada, bob]
    callers = Callers(lambda: KeyRing(there), lambda: now)
    first = callers.find(key.encode())
    assert first is not None
    visits = [first.begin_request(now) for _ in range(2)]
    there.remove(ada)
    callers.reload()
    assert callers.find(key.encode()) is None
    there.append(ada)
    callers.reload()
    again = callers.find(key.encode())
    assert again is first
    assert refused_head(again, now) == 30
    # One with nothing to remember is forgotten.
    for visit in visits:
        visit.end(0, now)
    there.remove(ada)
    now = 60.0
    callers.reload()
    there.append(ada)
    callers.reload()
    assert callers.find(key.encode()) is not first


def test_key_ring_counts() -> None:
    assert len(KeyRing([ApiKey("a", b"1" * 32, "a", RateLimits())])) == 1
