"""Estimates of the tokens that a request may use, before its prompt has been tokenized."""

from dataclasses import dataclass

from pagewire.v1 import inference_pb2 as pb

# An estimate; the true number of tokens replaces it at the end of the request.
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens of a prompt and of its outputs. A prompt counts once for all its outputs.

    `output` are the tokens that `max_tokens` allows. A request without `max_tokens` has them in
    `without_limit` instead: as many as fit into the model's context.
    """

    prompt: int
    output: int
    without_limit: int = 0

    @property
    def required(self) -> int:
        """Tokens that the key must have left before the request is admitted."""
        return self.prompt + self.output

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.prompt + other.prompt,
            self.output + other.output,
            self.without_limit + other.without_limit,
        )


NO_COST = Cost(0, 0)


def cost_of(request: pb.GenerateRequest, prompt: int, max_model_len: int, outputs: int = 1) -> Cost:
    """The cost of a prompt of about `prompt` tokens with `outputs` outputs.

    For a beam search the request has the number of outputs.
    """
    if request.HasField("beam_search"):
        outputs = request.beam_search.num_returned or request.beam_search.width
    if not request.stop.HasField("max_tokens"):
        resumed = len(request.resume_token_ids)
        return Cost(prompt, outputs * resumed, outputs * max(0, max_model_len - prompt - resumed))
    return Cost(prompt, outputs * max(request.stop.max_tokens, len(request.resume_token_ids)))


def usage_of(finish: pb.Finish) -> pb.Usage:
    """The usage of a request that has ended; none if it failed before it was admitted."""
    completed = finish.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    return finish.usage if completed or finish.HasField("queue_seconds") else pb.Usage()


def estimate_prompt(request: pb.GenerateRequest) -> int:
    """The number of tokens of a prompt, estimated if it is text."""
    if request.WhichOneof("input") == "prompt_token_ids":
        return kept_tokens(request, len(request.prompt_token_ids.ids))
    texts = [request.prompt, *(message.content for message in request.chat.messages)]
    texts += [request.pair.instruction, request.pair.query, request.pair.document]
    return kept_tokens(request, text_tokens(sum(len(text.encode()) for text in texts)))


def kept_tokens(request: pb.GenerateRequest, tokens: int) -> int:
    """How many of a prompt's tokens are computed; truncation may drop some."""
    return (
        min(tokens, request.truncate_prompt_tokens)
        if request.truncate_prompt_tokens > 0
        else tokens
    )


def text_tokens(size: int) -> int:
    """The estimated number of tokens of a text of `size` bytes."""
    return size // _BYTES_A_TOKEN
