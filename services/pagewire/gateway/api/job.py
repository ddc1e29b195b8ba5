"""The job that a request body asks for."""

from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.errors import RequestError
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.formatting import Formatter, PooledForm
from pagewire.gateway.details.details import Details
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.generation.generation import generates_nothing
from pagewire.gateway.generation.prompt_log import PromptWishes
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Job:
    """Requests for the schedulers, and how their output is formatted.

    `requests` has the candidates of the first prompt, then those of the second, and so on. Each
    prompt has `candidates`, and `n` of them become choices. Requests are small: the fields that
    the candidates of a prompt share are in `common`, once for each prompt. `prompts` is what the
    answer contains of each prompt, empty for nothing; `max_prompt_logprobs` bounds it. `ignored`
    names fields of the body that have no effect. `details` is what the answer shows beside
    the text. `input_field` is the field with the prompt, `limit_field` the one with the limit of
    the output, and `request_id` is the body's.
    """

    requests: list[pb.GenerateRequest]
    common: list[CommonFields]
    candidates: int
    n: int
    formatter: Formatter | AnswerForm | PooledForm
    stream: bool
    include_usage: bool
    shows_logprobs: bool
    ignored: tuple[str, ...] = ()
    details: Details | None = None
    request_id: str | None = None
    # The format of the text; None if all text is content.
    output: OutputFormat | None = None
    input_field: str = "prompt"
    limit_field: str = "max_tokens"
    prompts: tuple[PromptWishes, ...] = ()
    max_prompt_logprobs: int = 0

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.requests[0].model

    def common_of(self, index: int) -> CommonFields:
        """The fields that the request at `index` shares with its prompt's other candidates."""
        return self.common[index // self.candidates]


def name_cause(job: Job, error: RequestError) -> None:
    """Names the client's field in an error about a search or log probabilities behind it."""
    if error.field == "beam_search":
        error.rename_field("use_beam_search")
    elif error.field == "logprobs" and job.candidates > job.n and not job.shows_logprobs:
        error.rename_field("best_of")


def candidates(prompts: Iterable[pb.GenerateRequest], n: int) -> list[pb.GenerateRequest]:
    """`n` requests for each prompt, with consecutive seeds.

    Every candidate is a separate request. So it can continue on another scheduler, and candidate i
    equals the output of the prompt alone with `seed + i`.
    """
    made = []
    for prompt in prompts:
        for i in range(n):
            request = pb.GenerateRequest()
            request.CopyFrom(prompt)
            request.sampling.seed = _wrapped(prompt.sampling.seed + i)
            if n > 1:
                request.request_id += f"-{i}"
            if i > 0:
                leave_prompt_out(request)
            made.append(request)
    return made


def ask_for_prompt(request: pb.GenerateRequest, wishes: PromptWishes) -> None:
    """Lets the first candidate of a prompt ask for the prompt data in the answer."""
    if wishes.num_top is not None:
        request.prompt_logprobs = wishes.num_top
    request.prompt_text = wishes.echo and wishes.text is None
    request.return_prompt_token_ids = wishes.ids
    _justify_no_tokens(request)


def leave_prompt_out(request: pb.GenerateRequest) -> None:
    """Lets a further candidate ask for no prompt data: the first one asks for all candidates."""
    request.ClearField("prompt_logprobs")
    request.ClearField("prompt_text")
    request.ClearField("return_prompt_token_ids")
    _justify_no_tokens(request)


def _justify_no_tokens(request: pb.GenerateRequest) -> None:
    """Lets a request for no tokens ask for the prompt's text: it must ask for something."""
    if generates_nothing(request) and not request.HasField("prompt_logprobs"):
        request.prompt_text = True


def _wrapped(seed: int) -> int:
    """The seed modulo 2^64, in the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63
