"""The outputs of a prompt for the caller, complete or in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagewire.errors import RequestError
from pagewire.gateway.answers.choices import Choice, choices
from pagewire.gateway.api.chat_output import message_of
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.formatting import PooledForm, ended_by
from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import Candidate, TokenLogprobs
from pagewire.gateway.generation.prompt_log import ScoredToken
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at its place.

    `rank` is 1 for the likeliest token; None for a drawn token that is not among the requested
    likeliest tokens. `decoded_token` has U+FFFD for parts of characters.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# For each token, by id: the token itself and the likeliest tokens, as many as `logprobs` says.
Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text, incomplete if the output was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt, or a piece of it, with only the new `text`, `token_ids`, `logprobs`.

    `finish_reason` is "stop" or "length", or None while the output continues. `stop_reason` is the
    stop string or the token of `stop_token_ids` that ended it, otherwise None.
    `cumulative_logprob` and `logprobs` are None unless the parameter `logprobs` is given; in a
    stream only the last piece has `cumulative_logprob`.

    `text` is the model's own. `content`, `reasoning` and `tool_calls` are the parts of a complete
    answer to a chat, as over HTTP; in a stream they come with the last piece.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt, or new pieces of them.

    `prompt` is None if token ids or messages were given. `prompt_token_ids` are the model's input;
    in a stream they come with the end, unless they were given. If the parameter `prompt_logprobs`
    is given, the field of that name has an entry for each prompt token, None for the first. `error`
    says why there are no outputs, if the caller asked for errors instead of an exception.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The caller's input: a text or token ids. Both are None for a conversation."""

    text: str | None = None
    token_ids: list[int] | None = None


def whole_output(prompt: Prompt, job: Job, generations: Sequence[Generation]) -> RequestOutput:
    """The complete outputs of a prompt; all its generations have ended without a failure."""
    output = _output(prompt, generations)
    output.outputs = [
        _whole(index, choice, job) for index, choice in enumerate(choices(job, generations))
    ]
    for each in output.outputs:
        _read(each, each.text, job.output)
    _end(output, generations)
    return output


def failed_output(
    prompt: Prompt, generations: Sequence[Generation], error: RequestError
) -> RequestOutput:
    """A prompt without outputs."""
    output = _output(prompt, generations)
    output.finished, output.error = True, error
    return output


class Pieces:
    """Cuts the outputs of a prompt into pieces; records the part that is already taken."""

    def __init__(self, prompt: Prompt, job: Job, generations: Sequence[Generation]) -> None:
        self._prompt = prompt
        self._job = job
        self._generations = generations
        self._texts: list[list[str]] = [[] for _ in generations]
        self._num_given = [0] * len(generations)

    def take(self, updated: Sequence[Generation]) -> RequestOutput:
        """The new pieces of the `updated` generations of the prompt."""
        output = _output(self._prompt, self._generations)
        output.outputs = [self._piece(generation) for generation in updated]
        if all(generation.finish is not None for generation in self._generations):
            _end(output, self._generations)
        return output

    def _piece(self, generation: Generation) -> CompletionOutput:
        index = generation.index
        new = generation.tokens[self._num_given[index] :].tolist()
        self._num_given[index] += len(new)
        piece = CompletionOutput(index, generation.take_text(), new)
        self._texts[index].append(piece.text)
        if generation.logprobs is not None:
            piece.logprobs = [_position(token) for token in generation.logprobs.take()]
        if generation.finish is not None:
            _note_end(piece, generation.finish, self._job, generation.logprobs is not None)
            _read(piece, "".join(self._texts[index]), self._job.output)
        return piece


def _output(prompt: Prompt, generations: Sequence[Generation]) -> RequestOutput:
    return RequestOutput(generations[0].request_id, prompt.text, prompt.token_ids)


def _end(output: RequestOutput, generations: Sequence[Generation]) -> None:
    finish = generations[0].finish
    assert finish is not None
    output.finished = True
    output.num_cached_tokens = finish.usage.cached_tokens
    prompt = generations[0].prompt
    if output.prompt_token_ids is None and prompt is not None:
        output.prompt_token_ids = prompt.token_ids
    if prompt is not None and prompt.wishes.top is not None:
        scored = prompt.scored(1, prompt.num_tokens, prompt.wishes.top)
        output.prompt_logprobs = [None, *map(_scored, scored)]


def _scored(token: ScoredToken) -> dict[int, Logprob]:
    """The candidates of a place in the prompt, by token id; its own token comes first."""
    found = {token.token.token_id: _logprob(token.token, token.rank)}
    for rank, candidate in enumerate(token.top, start=1):
        found.setdefault(candidate.token_id, _logprob(candidate, rank))
    return found


def _whole(index: int, choice: Choice, job: Job) -> CompletionOutput:
    output = CompletionOutput(index, choice.text, list(choice.token_ids))
    if choice.logprobs is not None:
        output.logprobs = [_position(token) for token in choice.logprobs.take()]
    _note_end(output, choice.finish, job, choice.logprobs is not None)
    return output


def _read(output: CompletionOutput, text: str, form: OutputFormat | None) -> None:
    """Splits the whole text of an output into its parts."""
    if form is None:
        output.content = text
        return
    parser = form.parser()
    message = message_of([*parser.feed(text), *parser.finish()], form.short_ids)
    output.content = message["content"]
    output.reasoning = message.get("reasoning") if form.shows_reasoning else None
    for call in message.get("tool_calls", ()):
        made = call["function"]
        output.tool_calls.append(ToolCall(call["id"], made["name"], made["arguments"]))


def _note_end(output: CompletionOutput, finish: pb.Finish, job: Job, has_logprobs: bool) -> None:
    assert not isinstance(job.formatter, AnswerForm | PooledForm)
    ended = ended_by(finish, job.formatter.stop_token_ids)
    output.finish_reason, output.stop_reason = ended["finish_reason"], ended["stop_reason"]
    if has_logprobs:
        output.cumulative_logprob = finish.cumulative_logprob


def _position(token: TokenLogprobs) -> dict[int, Logprob]:
    """The candidates of one place, by token id; the likeliest ones come first."""
    found = {
        candidate.token_id: _logprob(candidate, rank)
        for rank, candidate in enumerate(token.top, start=1)
    }
    found.setdefault(token.token.token_id, _logprob(token.token, None))
    return found


def _logprob(candidate: Candidate, rank: int | None) -> Logprob:
    assert candidate.logprob is not None, "only the first token of a prompt has none"
    return Logprob(candidate.logprob, rank, candidate.text)
