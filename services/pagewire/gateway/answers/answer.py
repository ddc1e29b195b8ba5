"""From a job to its HTTP answer."""

from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive

from pagewire.context_length import CONTEXT_LENGTH_EXCEEDED
from pagewire.errors import RequestError
from pagewire.gateway.answers.choices import Choice, choices
from pagewire.gateway.answers.named_events import named_body
from pagewire.gateway.answers.paced_json import (
    PacedJson,
    TokenSource,
    object_of_pieces,
    object_pieces,
    paced_logprobs,
    paced_prompt_logprobs,
)
from pagewire.gateway.answers.parsed_body import parsed_body
from pagewire.gateway.answers.pooled_body import pooled_body
from pagewire.gateway.answers.prompt_logprobs import has_logprobs, last_strings
from pagewire.gateway.answers.run import Run
from pagewire.gateway.answers.sse import EventStream
from pagewire.gateway.answers.writers import writer_of
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.formatting import Formatter, PooledForm, json_utf8, usage
from pagewire.gateway.api.job import Job, name_cause
from pagewire.gateway.auth.charge import Charge
from pagewire.gateway.details.written_details import detailed_choice, details_beside_choices
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.routing.schedulers import Schedulers

# Strings joined into one piece of a body. Each has a few kilobytes, or the text of one choice.
_STRINGS_A_PIECE = 16
_LARGE_STRING = 1 << 16
# The schedulers' names of inputs; over HTTP the field has another name.
_INPUT_FIELDS = frozenset({"prompt", "pair", "messages"})


async def answer(
    job: Job,
    schedulers: Schedulers,
    receive: Receive,
    charge: Charge | None,
    arrived: float,
    on_start: Callable[[Sequence[Generation]], object] = lambda generations: None,
) -> Response:
    """Runs a job; `arrived` is when its request arrived, by time.perf_counter().

    `on_start` gets the generations before they are submitted.

    Raises RequestError or ClientGoneError for failures before the first byte of the answer.

    A streamed answer begins with the first update of a generation. So a request that is refused in
    the queue still gets its own HTTP status.
    """
    run = Run(job, schedulers, arrived)
    if charge is not None:
        charge.follow(run.generations)
    on_start(run.generations)
    await run.start(receive)
    try:
        updated = await run.next_updates()
        if job.stream:
            return EventStream(run, updated, writer_of(job))
        while not run.finished:
            await run.next_updates()
    except BaseException as error:
        run.close()
        if isinstance(error, RequestError):
            _use_names_of(job, error, run)
        raise
    run.close()
    if isinstance(job.formatter, AnswerForm):
        return PacedJson(await named_body(job.formatter, job.output, run))
    if isinstance(job.formatter, PooledForm):
        return PacedJson(await pooled_body(job.formatter, run))
    return PacedJson(await (_body if job.output is None else parsed_body)(job, run))


def _use_names_of(job: Job, error: RequestError, run: Run) -> None:
    """Gives the input, and the limit of the output, their names in the request's body.

    One of several inputs has its index, too.
    """
    name = job.input_field
    failed = next((each for each in run.generations if each.failure is error), None)
    if len(job.common) > 1 and failed is not None:
        name += f" at index {failed.prompt_index}"
    if error.reason == CONTEXT_LENGTH_EXCEEDED:
        error.message = error.message.replace("max_tokens", job.limit_field)
        for given in ("the messages", "the prompt"):
            error.message = error.message.replace(given, f"the {name}")
        error.field = job.input_field  # as in OpenAI's API, also where max_tokens is too large
    elif error.field in _INPUT_FIELDS:
        error.rename_field(name)
        error.field = job.input_field
    else:
        name_cause(job, error)


async def _body(job: Job, run: Run) -> list[bytes]:
    """The body of an answer that is not streamed, in pieces."""
    pacer, formatter = Pacer(), job.formatter
    assert not isinstance(formatter, AnswerForm | PooledForm)
    envelope = formatter.envelope.wrap([], usage=usage(run.generations))
    first, last = "".join(object_pieces(envelope, "choices", ["[\0]"])).split("\0")
    pieces = [first.encode()]
    if job.details is not None:
        beside = await details_beside_choices(job.details, run.generations[0], pacer)
        pieces = ["".join(["{", *beside, first.removeprefix("{")]).encode()]
    strings: list[str] = []
    for index, choice in enumerate(choices(job, run.generations)):
        strings.append("," if index else "")
        written = await _choice_strings(formatter, index, choice, pacer)
        if job.details is not None:
            written = await detailed_choice(
                job.details, written, choice.token_ids, choice.prompt, pacer
            )
        for string in written:
            strings.append(string)
            if len(strings) >= _STRINGS_A_PIECE or len(string) > _LARGE_STRING:
                pieces.append("".join(strings).encode())
                strings.clear()
                await pacer.pause_if_due()
    strings += await last_strings(job, run, last, pacer)
    return [*pieces, *(string.encode() for string in strings)]


async def _choice_strings(
    formatter: Formatter, index: int, choice: Choice, pacer: Pacer
) -> list[str]:
    prompt, text = choice.prompt, choice.text
    sources: list[TokenSource] = []
    large: dict[str, list[str]] = {}
    if prompt is not None and prompt.wishes.echo:
        text = prompt.text + text
        if prompt.wishes.echoed_top is not None:
            sources.append(prompt.echoed())
    fields = {**formatter.whole(index, text, choice.finish), "logprobs": None}
    if choice.logprobs is not None:
        sources.append(choice.logprobs)
    if any(source.waiting for source in sources):
        large["logprobs"] = await paced_logprobs(formatter, sources, pacer)
    if formatter.prompt_logprobs_in_choices and has_logprobs(prompt):
        fields["prompt_logprobs"] = None
        large["prompt_logprobs"] = await paced_prompt_logprobs(prompt, pacer)
    return object_of_pieces(fields, large) if large else [json_utf8(fields)]
