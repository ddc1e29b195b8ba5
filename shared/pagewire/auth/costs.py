"""What a request may cost its key, before its prompt has been tokenized."""

from dataclasses import dataclass

from pagewire.v1 import inference_pb2 as pb

# A rough count for text that has not been tokenized yet; the true one replaces it at the end.
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens of a prompt and its outputs. A prompt counts once, however many outputs it has.

    `output` are those that `max_tokens` allows. Without it they are `without_limit`: as many as
    the model's length leaves.
    """

    prompt: int
    output: int
    without_limit: int = 0

    @property
    def least(self) -> int:
        """What the key must have left."""
        return self.prompt + self.output

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.prompt + other.prompt,
            self.output + other.output,
            self.without_limit + other.without_limit,
        )


NO_COST = Cost(0, 0)


def cost_of(request: pb.GenerateRequest, prompt: int, max_model_len: int, outputs: int = 1) -> Cost:
    """The cost of a prompt of about so many tokens, of which `outputs` choices are made.

    A beam search says itself how many it makes.
    """
    if request.HasField("beam_search"):
        outputs = request.beam_search.num_returned or request.beam_search.width
    if not request.stop.HasField("max_tokens"):
        resumed = len(request.resume_token_ids)
        return Cost(prompt, outputs * resumed, outputs * max(0, max_model_len - prompt - resumed))
    return Cost(prompt, outputs * max(request.stop.max_tokens, len(request.resume_token_ids)))


def usage_of(finish: pb.Finish) -> pb.Usage:
    """What a request has used by its end, well or badly: nothing if it was never admitted."""
    completed = finish.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    return finish.usage if completed or finish.HasField("queue_seconds") else pb.Usage()


def estimate_prompt(request: pb.GenerateRequest) -> int:
    """About how many tokens a prompt has."""
    if request.WhichOneof("input") == "prompt_token_ids":
        return len(request.prompt_token_ids.ids)
    texts = [request.prompt, *(message.content for message in request.chat.messages)]
    return text_tokens(sum(len(text.encode()) for text in texts))


def text_tokens(size: int) -> int:
    """About how many tokens a text of so many bytes has."""
    return size // _BYTES_A_TOKEN
