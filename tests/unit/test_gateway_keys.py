"""API keys: files, digests, accounts of what they use."""

import hashlib
import json
from pathlib import Path

import pytest

from pagewire.errors import Code, RequestError
from pagewire.gateway.accounts import Account
from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation import Generation, Mailbox
from pagewire.gateway.job import Job
from pagewire.gateway.keys import ApiKey, KeyRing, entry_of, new_key, read_keys
from pagewire.gateway.rate_limits import RateLimits, TokenBucket
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


def job(prompts: int = 1, max_tokens: int = 10) -> Job:
    requests = [
        pb.GenerateRequest(prompt="x" * 40, stop=pb.StopConditions(max_tokens=max_tokens))
        for _ in range(prompts)
    ]
    return Job(requests, 1, 1, None, False, False, False)  # type: ignore[arg-type]


def refusal(holder: Account, wanted: Job, now: float) -> tuple[int, int]:
    with pytest.raises(ApiError) as caught:
        holder.admit(wanted, now)
    return caught.value.status, int((caught.value.headers or {}).get("retry-after", 0))


def test_requests_a_minute() -> None:
    holder = account(requests_per_minute=2)
    holder.admit(job(), 0.0)
    holder.admit(job(), 0.0)
    assert refusal(holder, job(), 0.0) == (429, 30)
    holder.admit(job(), 30.0)
    headers = dict(holder.headers(30.0))
    assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"x-ratelimit-reset-requests"] == b"60.000s"


def test_tokens_are_reserved_and_then_settled() -> None:
    holder = account(tokens_per_minute=60)
    permit = holder.admit(job(max_tokens=40), 0.0)  # 10 for the prompt, 40 for the output
    assert refusal(holder, job(max_tokens=10), 0.0) == (429, 10)
    run = Generation(pb.GenerateRequest(), 0, 0, Mailbox(), False)
    run.prompt_tokens = 7
    run.extend(pack([1, 2, 3]), b"", 0.0)
    permit.generations = [run]
    permit.close(0.0)
    assert holder.tokens is not None
    assert holder.tokens.level(0.0) == 50.0
    # More than a minute's worth is let in with a full bucket, and paid for afterwards.
    holder.admit(job(max_tokens=1000), 60.0).close(60.0)
    assert holder.tokens.level(60.0) == 60.0


@pytest.mark.parametrize(
    ("ended", "left"), [("well", 60 - 9 - 25), ("badly", 60), ("given up", 60 - 10 - 40)]
)
def test_a_beam_search_is_paid_for(ended: str, left: int) -> None:
    holder, wanted = account(tokens_per_minute=60), job(max_tokens=40)
    wanted.requests[0].beam_search.width = 2
    permit = holder.admit(wanted, 0.0)
    run = Generation(wanted.requests[0], 0, 0, Mailbox(), False)
    if ended == "well":
        usage = pb.Usage(prompt_tokens=9, completion_tokens=25)
        run.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    elif ended == "badly":
        run.fail(RequestError(Code.UNAVAILABLE, "no worker"))
    permit.generations = [run]
    permit.close(0.0)
    assert holder.tokens is not None
    assert holder.tokens.level(0.0) == left


def test_prompts_at_once() -> None:
    holder = account(max_concurrent=3)
    first = holder.admit(job(2), 0.0)
    assert refusal(holder, job(2), 0.0) == (429, 1)
    assert refusal(holder, job(4), 0.0) == (400, 0)
    first.close(0.0)
    holder.admit(job(3), 0.0)


def test_a_head_is_refused_for_what_no_body_could_change() -> None:
    holder = account(requests_per_minute=1, max_concurrent=2)
    holder.open = 1
    holder.check_head(0.0)
    holder.open = 2
    with pytest.raises(ApiError, match="2 requests of this API key are being answered") as caught:
        holder.check_head(0.0)
    assert caught.value.headers == {"retry-after": "1"}
    holder.open = 0
    holder.admit(job(), 0.0).close(0.0)
    with pytest.raises(ApiError, match="1 requests a minute") as caught:
        holder.check_head(0.0)
    assert caught.value.headers == {"retry-after": "60"}


def test_a_refused_request_uses_nothing() -> None:
    holder = account(requests_per_minute=5, tokens_per_minute=30)
    holder.admit(job(), 0.0)
    assert refusal(holder, job(), 0.0)[0] == 429
    assert holder.requests is not None
    assert (holder.requests.level(0.0), holder.running) == (4.0, 1)


def test_use_outlives_a_reload_where_the_limit_is_the_same() -> None:
    holder = account(requests_per_minute=2, tokens_per_minute=100)
    permit = holder.admit(job(), 0.0)
    limits = RateLimits(requests_per_minute=2, tokens_per_minute=500)
    holder.renew(ApiKey("ada", b"d", "ada", limits), 0.0)
    assert holder.requests is not None
    assert holder.tokens is not None
    assert (holder.requests.level(0.0), holder.tokens.level(0.0)) == (1.0, 500.0)
    permit.close(0.0)
    assert holder.running == 0


def test_key_ring_counts() -> None:
    assert len(KeyRing([ApiKey("a", b"1" * 32, "a", RateLimits())])) == 1
