"""API keys: their files, digests, rate limits, and accounts."""

import hashlib
import json
from pathlib import Path

import pytest

from pagewire.auth.callers import Callers
from pagewire.auth.keys import ApiKey, KeyRing, entry_of, new_key, read_keys
from pagewire.auth.rate_limits import RateLimits, TokenBucket
from pagewire.errors import Code, RequestError

DIGEST = "ab" * 32


def test_a_key_is_found_though_its_file_has_only_a_digest(tmp_path: Path) -> None:
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


def test_only_the_digest_of_a_key_stays_in_memory() -> None:
    key = new_key()
    ring = read_keys(None, f"ops={key}")
    assert ring is not None
    found = ring.find(key.encode())
    assert found is not None
    assert found.name == "ops"
    assert found.digest == hashlib.sha256(key.encode()).digest()
    assert key not in repr(found)
    assert key not in repr(vars(ring))


def test_keys_of_file_and_environment_are_combined(tmp_path: Path) -> None:
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
        ("- {name: a, name: b}", "it has the key 'name' 2 times; keep one"),
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


def test_short_keys_are_refused_and_not_quoted() -> None:
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


def test_a_key_that_is_removed_and_added_again_keeps_its_use() -> None:
    key, now = new_key(), 0.0
    digest = hashlib.sha256(key.encode()).digest()
    ada = ApiKey("ada", digest, "ada", RateLimits(requests_per_minute=2))
    bob = ApiKey("bob", b"b" * 32, "bob", RateLimits())
    configured = [ada, bob]
    callers = Callers(lambda: KeyRing(configured), lambda: now)
    first = callers.find(key.encode())
    assert first is not None
    visits = [first.begin_request(now) for _ in range(2)]
    configured.remove(ada)
    callers.reload()
    assert callers.find(key.encode()) is None
    configured.append(ada)
    callers.reload()
    again = callers.find(key.encode())
    assert again is first
    with pytest.raises(RequestError) as caught:
        again.begin_request(now)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert caught.value.retry_after == 30
    # An account without open requests and with full buckets is forgotten.
    for visit in visits:
        visit.end(0, now)
    configured.remove(ada)
    now = 60.0
    callers.reload()
    configured.append(ada)
    callers.reload()
    assert callers.find(key.encode()) is not first


def test_key_ring_counts() -> None:
    assert len(KeyRing([ApiKey("a", b"1" * 32, "a", RateLimits())])) == 1
