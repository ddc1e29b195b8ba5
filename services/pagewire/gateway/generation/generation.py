"""One choice's run at the schedulers, and the mailbox through which its reader is woken."""

import asyncio
import math
import time
from array import array
from collections.abc import Callable

from pagewire.auth.costs import usage_of
from pagewire.errors import Code, RequestError
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.generation.input import NO_INPUT, Input
from pagewire.gateway.generation.logprob_log import LogprobLog
from pagewire.suspicion import Loss, Suspicion
from pagewire.v1 import inference_pb2 as pb


class Mailbox:
    """Which generations of one HTTP request have news; one reader waits on all of them.

    News wait in their generations, so a reader that lags finds fewer and larger pieces, and never
    more than its requests' own max_tokens.
    """

    __slots__ = ("_gone", "_news", "_waiter")

    def __init__(self) -> None:
        self._news: list[Generation] = []
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False

    def post(self, generation: "Generation") -> None:
        """Adds a generation to the news; the caller sees to it that it is added once."""
        self._news.append(generation)
        self._wake()

    def hang_up(self) -> None:
        """The client is gone: `take` raises ClientGoneError from now on."""
        self._gone = True
        self._wake()

    @property
    def gone(self) -> bool:
        """Whether the client is."""
        return self._gone

    async def take(self) -> "list[Generation]":
        """The generations with news, at least one, each taken off the list."""
        if not self._news and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._gone:
            raise ClientGoneError
        news, self._news = self._news, []
        for generation in news:
            generation.posted = False
        return news

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Generation:
    """One choice's run: what has arrived, and all that is needed to run it again elsewhere.

    `request` is small; `common` is what it shares with the other choices of its prompt. `arrived`
    is when its HTTP request did, by time.perf_counter(); now if None.
    `index` is the choice's in the answer, `prompt` its prompt's among the request's prompts.
    `tokens` are all generated tokens received so far; text received and not taken yet waits here.
    `logprobs` are those of the same tokens, None if the request wants none.
    A generation that is not `eager` posts to its mailbox only when it has ended.
    """

    __slots__ = (
        "_attempts",
        "_held_at_loss",
        "_text",
        "_used",
        "closed",
        "common",
        "eager",
        "ended_at",
        "failure",
        "finish",
        "first_token_at",
        "handed_back",
        "index",
        "logprobs",
        "mailbox",
        "moved",
        "on_use",
        "posted",
        "prompt",
        "prompt_tokens",
        "refused_by",
        "request",
        "started_at",
        "suspicion",
        "tokens",
        "waits_again",
        "worker_losses",
    )

    def __init__(
        self,
        request: pb.GenerateRequest,
        index: int,
        prompt: int,
        mailbox: Mailbox,
        eager: bool,
        common: Input = NO_INPUT,
        arrived: float | None = None,
    ) -> None:
        self.request = request
        self.common = common
        self.index = index
        self.prompt = prompt
        self.mailbox = mailbox
        self.eager = eager
        self.tokens = array("i")
        self.logprobs = LogprobLog() if request.HasField("logprobs") else None
        self.prompt_tokens = 0
        self.finish: pb.Finish | None = None
        self.failure: RequestError | None = None
        self.closed = False
        self.posted = False
        self.moved = False  # it has lost its scheduler, or waited for one
        self.waits_again = False  # it has waited as long as requests do, while suspects were tried
        self.refused_by: set[str] = set()  # schedulers that had no room for it
        # Schedulers that had no worker for it, and their `Link.returns` at that time.
        self.handed_back: dict[str, int] = {}
        self.started_at = time.perf_counter() if arrived is None else arrived
        self.first_token_at = 0.0
        self.ended_at = 0.0
        self._attempts = 0
        self.suspicion = Suspicion()
        # Workers that may have been lost through it, as the scheduler says that gave it back, and
        # the tokens that it had then.
        self.worker_losses: tuple[pb.WorkerLosses, int] | None = None
        self._held_at_loss = 0
        self._text = bytearray()
        # What its scheduler says that it used, completed or not; `on_use` is called when it does.
        self._used: pb.Usage | None = None
        self.on_use: Callable[[], None] | None = None

    @property
    def losses(self) -> int:
        """Schedulers that were lost with it in a row, without a token of it in between."""
        return self.suspicion.losses if len(self.tokens) == self._held_at_loss else 0

    def note_loss(self, loss: Loss) -> None:
        """The scheduler that had it is gone."""
        if len(self.tokens) != self._held_at_loss:
            self.suspicion.clear()
        self.suspicion.add_loss(loss)
        self._held_at_loss = len(self.tokens)

    def note_worker_losses(self, finish: pb.Finish) -> None:
        """A scheduler gives it back; the next one should know what this one knows."""
        told = finish.worker_losses if finish.HasField("worker_losses") else None
        self.worker_losses = None if told is None else (told, len(self.tokens))

    @property
    def model(self) -> str:
        """The name of the model that runs it."""
        return self.request.model

    @property
    def request_id(self) -> str:
        """What logs call it."""
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self.finish is not None or self.failure is not None

    @property
    def unheard(self) -> bool:
        """Whether it was sent and given up, and no scheduler has said what it used."""
        return self._attempts > 0 and not self.ended and self._used is None

    @property
    def settled(self) -> bool:
        """Whether nothing more will be said of what it used."""
        return self._attempts == 0 or self._used is not None

    @property
    def used_prompt_tokens(self) -> int:
        """Prompt tokens computed for it or for its siblings, as far as is known."""
        told = 0 if self._used is None else self._used.prompt_tokens
        return max(self.prompt_tokens, told)

    @property
    def used_tokens(self) -> int:
        """Tokens generated for it, as far as is known."""
        told = 0 if self._used is None else self._used.completion_tokens
        return max(len(self.tokens), told)

    def note_use(self, finish: pb.Finish) -> None:
        """A scheduler is done with it: what it used counts, whether or not it is still wanted."""
        self._used = usage_of(finish)
        if self.on_use is not None:
            self.on_use()

    def extend(self, token_bytes: bytes, text: bytes, now: float) -> None:
        """Takes in new tokens (little-endian int32) and new text (UTF-8)."""
        if token_bytes:
            if not self.tokens:
                self.first_token_at = now
            self.tokens.frombytes(token_bytes)
        self._text += text
        if self.eager and not self.posted:
            self.posted = True
            self.mailbox.post(self)

    def take_text(self) -> str:
        """The text that has arrived since the last call."""
        text = self._text.decode(errors="replace")
        self._text.clear()
        return text

    def end(self, finish: pb.Finish) -> None:
        """The scheduler is done with it, well or badly."""
        self.note_use(finish)
        if finish.reason == pb.FINISH_REASON_ERROR:
            self.fail(_request_error(finish.error))
        elif finish.reason == pb.FINISH_REASON_UNSPECIFIED:
            self.fail(RequestError(Code.INTERNAL, "the scheduler ended it without a reason"))
        elif self.logprobs is not None and self.logprobs.count != len(self.tokens):
            self.fail(RequestError(Code.INTERNAL, "the scheduler gave no log probabilities"))
        else:
            if self.logprobs is not None:
                finish.cumulative_logprob = self.logprobs.total  # of earlier attempts too
            self.finish = finish
            self._post_end()

    def fail(self, failure: RequestError) -> None:
        """It will not be completed."""
        self.failure = failure
        self._post_end()

    @property
    def seconds_left(self) -> float:
        """Until its deadline."""
        if not self.request.HasField("deadline_ms"):
            return math.inf
        return self.started_at + self.request.deadline_ms / 1000 - time.perf_counter()

    def next_attempt(self) -> bytes:
        """What to send to a scheduler: the request, or what goes on after the tokens received.

        A later attempt has an id of its own, because a scheduler may not have noticed yet that
        the stream of the earlier one is gone.
        """
        self._attempts += 1
        request = self.request
        if self._attempts > 1 or request.HasField("deadline_ms"):
            request = pb.GenerateRequest()
            request.CopyFrom(self.request)
        if self._attempts > 1:
            request.request_id = f"{self.request.request_id}.{self._attempts}"
            request.resume_token_ids.extend(self.tokens)
        if request.HasField("deadline_ms"):
            request.deadline_ms = max(1, math.ceil(self.seconds_left * 1000))
        return request.SerializeToString() + self.common.data

    def _post_end(self) -> None:
        self.ended_at = time.perf_counter()
        if not self.posted:
            self.posted = True
            self.mailbox.post(self)


def _request_error(error: pb.Error) -> RequestError:
    known = error.code in Code._value2member_map_
    code = Code(error.code) if known else Code.INTERNAL
    retry_after = error.retry_after_ms / 1000 if error.HasField("retry_after_ms") else None
    return RequestError(
        code, error.message or "the scheduler gave no reason", error.field, retry_after
    )
