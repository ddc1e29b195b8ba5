"""From a client's message to a request that can be queued."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pagewire.errors import RequestError, invalid
from pagewire.scheduler import failures
from pagewire.scheduler.core.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.open_request import Request
from pagewire.scheduler.requests import (
    ModelLimits,
    ParsedRequest,
    check_model,
    check_request_id,
    parse_request,
)
from pagewire.scheduler.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

# So few token ids are checked at once, 30 ns each: a thread there and back takes 90 us.
FEW_IDS = 1024

# What a request without a deadline counts as in the order of the policy `deadline`.
USUAL_DEADLINE_MS = 60_000


class Parser:
    """Checks messages, and tokenizes them beside the event loop."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | TokenIdsOnly,
        policy: SchedulingPolicy,
        policy_name: str,
        limits: Callable[[], ModelLimits],
    ) -> None:
        """`limits` gives those of the moment, or raises RequestError."""
        self._limits = limits
        self._model = model
        self._tokenizer = tokenizer
        self._policy = policy
        self._policy_name = policy_name
        # Tokenization is CPU work of another language that releases the interpreter's lock.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def parse(self, message: pb.GenerateRequest) -> ParsedRequest:
        """The request that a message asks for; RequestError if it cannot be run."""
        check_request_id(message.request_id)
        check_model(message.model, self._model)
        if message.priority and not self._policy.uses_priority:
            raise invalid(
                "priority",
                f"priority is {message.priority}, but this server admits by "
                f"{self._policy_name}; leave it out or start with --policy priority",
            )
        try:
            if 0 < len(message.prompt_token_ids.ids) <= FEW_IDS:
                return parse_request(message, self._tokenizer, self._limits())
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, parse_request, message, self._tokenizer, self._limits()
            )
        except RequestError:
            raise
        except Exception as error:
            log.exception("a request could not be parsed")
            raise failures.unparsed() from error


def begin(request: Request, parsed: ParsedRequest) -> Sequence:
    """Gives a request its sequence, which stands where resumed tokens have brought it."""
    sequence = Sequence(
        prompt=parsed.prompt,
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
    sequence.output.extend(parsed.resumed)
    request.sequence = sequence
    request.text = parsed.text
    request.include_stop_token = parsed.include_stop_token
    request.unreported_prompt = len(parsed.prompt)
    return sequence


def replay(request: Request, parsed: ParsedRequest) -> pb.Finish | None:
    """Brings the text up to the resumed tokens; how the request ended if they end it."""
    resumed = parsed.resumed
    if not resumed:
        return None
    stopped = resumed[-1] in parsed.stop_ids and len(resumed) > parsed.sampling.min_tokens
    if request.text is not None:
        for token in resumed[: -1 if stopped else None]:
            request.text.feed(token)
    return request.end_after(resumed[-1], stopped, len(resumed) >= parsed.max_tokens)


def _deadline(request: Request, deadline_ms: int | None) -> int:
    """When the request should have ended, in milliseconds of the monotonic clock."""
    return int(request.received * 1000) + (deadline_ms or USUAL_DEADLINE_MS)
