"""Prompt output of requests: text at once, log probabilities after the last chunk."""

import asyncio

import numpy as np

from pagewire.errors import invalid
from pagewire.scheduler.core.sequence import State
from pagewire.scheduler.requests import failures
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.parsing import ParsedRequest
from pagewire.scheduler.requests.prompt_output import AwaitedPrompt, prompt_output, read_scored
from pagewire.scheduler.requests.text_helper import TextHelpers
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.ready_workers import ReadyWorker
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb

# Tokens of a prompt that are decoded on the event loop; a token takes about 1 us.
INLINE_DECODED_TOKENS = 4096
# Tokens whose bytes are found in one turn of the loop; some tokenizers take 20 us each.
TOKEN_BYTES_A_TURN = 256
_NOT_FINITE = (
    "the model's logits for a prompt token are not finite (NaN or infinity); a wider --dtype may "
    "help"
)


class Prompts:
    """Delivers the prompt output of each request, in one message before its first token."""

    def __init__(self, tokenizer: Tokenizer | TokenIdsOnly, endings: Endings) -> None:
        self._tokenizer = tokenizer
        self._endings = endings
        self._knows_token_bytes = False

    async def prepare(
        self,
        request: Request,
        parsed: ParsedRequest,
        ended: pb.Finish | None,
        helpers: TextHelpers,
        vocab_size: int,
    ) -> None:
        """Prepares a request that is not queued yet, and delivers output that needs no worker.

        The request is still open afterwards if it is to be queued. `ended` is the end of a request
        whose resumed tokens end it. RequestError if the request cannot be run.
        """
        scored = parsed.prompt_logprobs is not None and len(parsed.tokens.prompt) > 1
        if scored and ended is not None:
            raise invalid(
                "prompt_logprobs", "the resumed tokens end the request; leave prompt_logprobs out"
            )
        text = await self._text(parsed, helpers) if parsed.prompt_text else ""
        if request.text is not None and parsed.prompt_logprobs is not None:
            await self._find_token_bytes(vocab_size)
        if not request.open:
            return
        request.awaited_prompt = AwaitedPrompt(text, request.text is not None)
        if scored:
            return
        self._deliver(request)
        if ended is None and not request.generates:
            ended = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
        if ended is not None:
            self._endings.close(request, State.COMPLETED, ended)

    def take(self, worker: ReadyWorker, message: worker_pb.PromptLogprobs) -> None:
        """Takes the log probabilities of a result, before its tokens.

        So a client has them before its first token, and a request that generates nothing ends
        without one. ValueError if they cannot be those of the oldest step in flight.
        """
        slots = worker.batch.slots
        for slot, scored in read_scored(message):
            if not 0 <= slot < worker.batch.limits.num_slots:
                raise ValueError(f"log probabilities of a prompt in slot {slot}")
            if not slots.live[slot]:
                continue  # its sequence has ended, or waits to run again
            sequence = slots.sequence(slot)
            if sequence.prompt_logprobs is None:
                raise ValueError(f"slot {slot} asks for no log probabilities of its prompt")
            request: Request = sequence.owner
            if np.isnan(scored.logprobs).any():
                self._endings.fail(request, failures.worker_failed(_NOT_FINITE))
                continue
            sequence.prompt_logprobs.add(scored)
            if sequence.prompt_logprobs.complete:
                self._deliver(request)
                if not request.generates:
                    worker.batch.finish(slot, State.COMPLETED)
                    finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
                    self._endings.close(request, State.COMPLETED, finish)

    def _deliver(self, request: Request) -> None:
        sequence, awaited = request.sequence, request.awaited_prompt
        assert sequence is not None
        assert awaited is not None
        message = prompt_output(
            sequence.prompt, awaited, sequence.prompt_logprobs, self._tokenizer.token_bytes
        )
        message.stream = request.stream
        request.awaited_prompt = None
        request.buffer.add_prompt(message)

    async def _text(self, parsed: ParsedRequest, helpers: TextHelpers) -> str:
        """The text of the prompt's tokens, special tokens included."""
        ids = parsed.tokens.prompt.tolist()
        if len(ids) <= INLINE_DECODED_TOKENS:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        wanted = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
        answer = await helpers.detokenize(wanted.SerializeToString())
        return pb.DetokenizeResponse.FromString(answer).text

    async def _find_token_bytes(self, vocab_size: int) -> None:
        """Finds the bytes of every token, once: the log probabilities of a prompt may name all."""
        if self._knows_token_bytes:
            return
        for at in range(0, vocab_size, TOKEN_BYTES_A_TURN):
            for token in range(at, min(vocab_size, at + TOKEN_BYTES_A_TURN)):
                self._tokenizer.token_bytes(token)
            await asyncio.sleep(0)
        self._knows_token_bytes = True
