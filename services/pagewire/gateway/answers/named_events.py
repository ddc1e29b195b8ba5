"""Answers of one generation whose stream has named events, and the same answers as a whole."""

from collections.abc import Sequence

from pagewire.errors import RequestError
from pagewire.gateway.answers.parsed_output import ParsedOutput
from pagewire.gateway.answers.run import Run
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.errors import ApiError, aborted
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.v1 import inference_pb2 as pb

# Writing the log probabilities of this many tokens takes some milliseconds.
_TOKENS_AT_ONCE = 32


class NamedEventWriter:
    """Formats the events of a generation's output in the order of its API."""

    def __init__(
        self, form: AnswerForm, output: OutputFormat | None, streamed: bool = True
    ) -> None:
        """Unless `streamed`, only the `body` is written."""
        self._streamed = streamed
        self._answer = form.events(streamed)
        self._parsed = ParsedOutput(output)
        self._began = False

    async def write_paced(self, generation: Generation, pacer: Pacer) -> list[str]:
        """The events for new output and its end, in pieces, without blocking the event loop.

        An aborted stream ends with an error; an aborted answer that is not `streamed` raises it as
        RequestError. These APIs have no finish reason for it, so it would look complete.
        """
        finish = generation.finish
        pieces: list[str] = []
        if not self._began:
            self._began = True
            known = finish is not None and not generation.prompt_tokens
            prompt = finish.usage.prompt_tokens if finish and known else generation.prompt_tokens
            pieces += self._answer.begin(prompt)
        log = generation.logprobs
        while log is not None and log.waiting:
            self._answer.logprobs(log.take(_TOKENS_AT_ONCE))
            await pacer.pause_if_due()
        for event in await self._parsed.take(generation, pacer):
            pieces += self._answer.feed((event,))
            await pacer.pause_if_due()
        if finish is not None and finish.reason == pb.FINISH_REASON_ABORT:
            if not self._streamed:
                raise aborted()
            pieces += self._answer.fail(ApiError.of(aborted()))
        elif finish is not None:
            reasoning = self._parsed.reasoning_tokens([generation])
            pieces += self._answer.finish(finish, reasoning)
        return pieces

    def closing(self, generations: Sequence[Generation]) -> str:
        """Empty: the end of the output is the end of the stream."""
        return ""

    def failure(self, error: RequestError) -> str:
        """The events of a stream that fails."""
        return "".join(self._answer.fail(ApiError.of(error)))

    def body(self) -> list[str]:
        """The JSON of the whole answer, in pieces, after its end was written."""
        return self._answer.body()


async def named_body(form: AnswerForm, output: OutputFormat | None, run: Run) -> list[bytes]:
    """The body of an answer that is not streamed; its generation has finished."""
    writer = NamedEventWriter(form, output, streamed=False)
    [generation] = run.generations
    await writer.write_paced(generation, Pacer())
    return [piece.encode() for piece in writer.body()]
