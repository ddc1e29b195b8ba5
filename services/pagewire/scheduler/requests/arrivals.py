"""From a client's message to a request that can be queued."""

import asyncio
import logging
from collections.abc import Callable

from pagewire.errors import RequestError, invalid
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.large_requests import Arrival
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.parsing import (
    ModelLimits,
    ParsedRequest,
    check_model,
    check_request_id,
    parse_request,
)
from pagewire.scheduler.requests.text_helper import TextHelpers
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

# Resumed tokens that are turned into text in one go; some tokenizers take 10 us for each.
REPLAYED_TOKENS = 512

# What a request without a deadline counts as in the order of the policy `deadline`.
USUAL_DEADLINE_MS = 60_000


class Parser:
    """Checks requests and tokenizes them: small ones at once, large ones in a helper process."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | TokenIdsOnly,
        helpers: TextHelpers,
        policy: SchedulingPolicy,
        policy_name: str,
        limits: Callable[[], ModelLimits],
    ) -> None:
        """`limits` gives those of the moment, or raises RequestError."""
        self._limits = limits
        self._model = model
        self._tokenizer = tokenizer
        self._helpers = helpers
        self._policy = policy
        self._policy_name = policy_name

    async def parse(self, arrival: Arrival) -> ParsedRequest:
        """The request that arrived, checked; RequestError if it cannot be run."""
        message = arrival.message
        check_request_id(message.request_id)
        check_model(message.model, self._model)
        if message.priority and not self._policy.uses_priority:
            raise invalid(
                "priority",
                f"priority is {message.priority}, but this server admits by "
                f"{self._policy_name}; leave it out or start with --policy priority",
            )
        try:
            limits = self._limits()
            tokens = None
            if arrival.data is not None:
                tokens = await self._helpers.tokens(arrival.data, limits)
            return parse_request(message, self._tokenizer, limits, tokens)
        except RequestError:
            raise
        except Exception as error:
            log.exception("a request could not be parsed")
            raise failures.unparsed() from error


def begin(request: Request, parsed: ParsedRequest) -> Sequence:
    """Gives a request its sequence, which stands where resumed tokens have brought it."""
    sequence = Sequence(
        prompt=parsed.tokens.prompt,
        sampling=parsed.sampling,
        max_tokens=parsed.max_tokens,
        stop_ids=parsed.stop_ids,
        arrival=request.arrival,
        priority=parsed.priority,
        cache_salt=parsed.cache_salt,
        tenant=parsed.tenant,
        deadline=_deadline(request, parsed.deadline_ms),
        owner=request,
    )
    sequence.output.frombytes(parsed.tokens.resumed.tobytes())
    request.sequence = sequence
    request.text = parsed.text
    request.include_stop_token = parsed.include_stop_token
    request.unreported_prompt = len(parsed.tokens.prompt)
    return sequence


async def replay(request: Request, parsed: ParsedRequest) -> pb.Finish | None:
    """Brings the text up to the resumed tokens, in pieces; how the request ended if they end it."""
    resumed = parsed.tokens.resumed.tolist()
    if not resumed:
        return None
    stopped = resumed[-1] in parsed.stop_ids and len(resumed) > parsed.sampling.min_tokens
    if request.text is not None:
        fed = resumed[: -1 if stopped else None]
        for at in range(0, len(fed), REPLAYED_TOKENS):
            for token in fed[at : at + REPLAYED_TOKENS]:
                request.text.feed(token)
            await asyncio.sleep(0)
    return request.end_after(resumed[-1], stopped, len(resumed) >= parsed.max_tokens)


def _deadline(request: Request, deadline_ms: int | None) -> int:
    """When the request should have ended, in milliseconds of the monotonic clock."""
    return int(request.received * 1000) + (deadline_ms or USUAL_DEADLINE_MS)
