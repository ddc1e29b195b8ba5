"""What each key has used of its limits, and the permit of one request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation import Generation
from pagewire.gateway.job import Job
from pagewire.gateway.keys import ApiKey
from pagewire.gateway.rate_limits import TokenBucket
from pagewire.v1 import inference_pb2 as pb

# A rough count for text that has not been tokenized yet; the true one replaces it at the end.
_BYTES_A_TOKEN = 4


class Account:
    """One key's use. Times are in seconds on a monotonic clock."""

    __slots__ = ("key", "open", "requests", "running", "tokens")

    def __init__(self, key: ApiKey, now: float) -> None:
        self.key = key
        self.running = 0  # prompts being answered
        self.open = 0  # generating requests, those included whose body is still on its way
        self.requests = _bucket(key.limits.requests_per_minute, None, now)
        self.tokens = _bucket(key.limits.tokens_per_minute, None, now)

    def renew(self, key: ApiKey, now: float) -> None:
        """The key was read again; what it has used still counts where its limit is the same."""
        self.key = key
        self.requests = _bucket(key.limits.requests_per_minute, self.requests, now)
        self.tokens = _bucket(key.limits.tokens_per_minute, self.tokens, now)

    def check_head(self, now: float) -> None:
        """ApiError 429 for a request that would be refused whatever its body says."""
        most = self.key.limits.max_concurrent
        if most is not None and self.open >= most:
            raise _too_many(
                f"{self.open} requests of this API key are being answered and {most} may be", 1
            )
        self._check_requests(now)

    def admit(self, job: Job, now: float) -> "Permit":
        """Lets a request in; ApiError 429 says how long to wait, 400 that waiting is no use."""
        prompts, tokens = len(job.requests), sum(map(_estimate, job.requests))
        most = self.key.limits.max_concurrent
        if most is not None and prompts > most:
            raise ApiError(
                400,
                f"the request has {prompts} prompts; this API key may have {most} at once, send "
                "fewer in a request",
                param="prompt",
            )
        if most is not None and self.running + prompts > most:
            raise _too_many(
                f"{self.running} prompts of this API key are being answered and {most} may be", 1
            )
        self._check_requests(now)
        if self.tokens is not None and (wait := self.tokens.seconds_until(tokens, now)):
            limit = self.tokens.per_minute
            raise _too_many(f"this API key may use {limit} tokens a minute", wait)
        self._charge(prompts, 1, tokens, now)
        return Permit(self, prompts, tokens)

    def settle(self, permit: "Permit", now: float) -> None:
        """The request is over: its true number of tokens replaces the estimate."""
        spent = sum(map(_spent, permit.generations))
        self._charge(-permit.prompts, 0, spent - permit.reserved, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """What is left, in the headers that OpenAI's clients read."""
        found: list[tuple[bytes, bytes]] = []
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                reset = bucket.seconds_until(bucket.per_minute, now)
                values = {
                    "limit": str(bucket.per_minute),
                    "remaining": str(max(0, int(bucket.level(now)))),
                    "reset": f"{reset:.3f}s",
                }
                found += [
                    (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
                    for name, value in values.items()
                ]
        return found

    def _check_requests(self, now: float) -> None:
        if self.requests is not None and (wait := self.requests.seconds_until(1, now)):
            limit = self.requests.per_minute
            raise _too_many(f"this API key may send {limit} requests a minute", wait)

    def _charge(self, prompts: int, requests: int, tokens: int, now: float) -> None:
        self.running += prompts
        if self.requests is not None and requests:
            self.requests.take(requests, now)
        if self.tokens is not None:
            self.tokens.take(tokens, now)


@dataclass(slots=True)
class Permit:
    """One request that was let in; `generations` are its runs once it has any."""

    account: Account | None
    prompts: int = 0
    reserved: int = 0
    generations: Sequence[Generation] = field(default_factory=tuple)

    def close(self, now: float) -> None:
        """The request is over; to be called once."""
        if self.account is not None:
            self.account.settle(self, now)


def _bucket(per_minute: int | None, before: TokenBucket | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is not None and before.per_minute == per_minute:
        return before
    return TokenBucket(per_minute, now)


def _estimate(request: pb.GenerateRequest) -> int:
    """Tokens that a request may take; without max_tokens those of its prompt alone."""
    if request.WhichOneof("input") == "prompt_token_ids":
        prompt = len(request.prompt_token_ids.ids)
    else:
        texts = [request.prompt, *(message.content for message in request.chat.messages)]
        prompt = sum(len(text.encode()) for text in texts) // _BYTES_A_TOKEN
    return prompt + request.stop.max_tokens


def _spent(generation: Generation) -> int:
    """Tokens that a request has taken. A beam search tells them at its end only: one that was given
    up is taken at its estimate."""
    if generation.finish is not None:
        usage = generation.finish.usage
        return usage.prompt_tokens + usage.completion_tokens
    if generation.failure is None and generation.request.HasField("beam_search"):
        return _estimate(generation.request)
    return generation.prompt_tokens + len(generation.tokens)


def _too_many(why: str, seconds: float) -> ApiError:
    wait = max(1, math.ceil(seconds))
    return ApiError(
        429,
        f"{why}; retry in {wait} s",
        "rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(wait)},
    )
