"""From a job to its HTTP answer."""

from starlette.responses import Response
from starlette.types import Receive

from pagewire.context_length import CONTEXT_LENGTH_EXCEEDED
from pagewire.errors import RequestError
from pagewire.gateway.api.formatting import json_utf8, usage
from pagewire.gateway.api.job import Job
from pagewire.gateway.auth.charge import Charge
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.http.choices import Choice, choices
from pagewire.gateway.http.paced_json import PacedJson, object_pieces, paced_logprobs
from pagewire.gateway.http.run import Run
from pagewire.gateway.http.sse import EventStream
from pagewire.gateway.routing.schedulers import Schedulers

# Strings joined into one piece of a body. Each has a few kilobytes, or the text of one choice.
_STRINGS_A_PIECE = 16


async def answer(
    job: Job, schedulers: Schedulers, receive: Receive, charge: Charge | None, arrived: float
) -> Response:
    """Runs a job; `arrived` is when its request arrived, by time.perf_counter().

    Raises RequestError or ClientGoneError for failures before the first byte of the answer.

    A streamed answer begins when the first generation has an update. So a request that is refused
    while it is queued still gets its own status.
    """
    run = Run(job, schedulers, arrived)
    if charge is not None:
        charge.follow(run.generations)
    await run.start(receive)
    try:
        updated = await run.next_updates()
        if job.stream:
            return EventStream(run, updated, job.formatter, job.include_usage)
        while not run.finished:
            await run.next_updates()
    except BaseException as error:
        run.close()
        if isinstance(error, RequestError) and error.reason == CONTEXT_LENGTH_EXCEEDED:
            error.field = job.input_field  # as in OpenAI's API, also where max_tokens is too large
        raise
    run.close()
    return PacedJson(await _body(job, run))


async def _body(job: Job, run: Run) -> list[bytes]:
    """The body of an answer that is not streamed, in pieces."""
    pacer = Pacer()
    envelope = job.formatter.envelope.wrap([], usage=usage(run.generations))
    first, last = "".join(object_pieces(envelope, "choices", ["[\0]"])).split("\0")
    pieces = [first.encode()]
    strings: list[str] = []
    for index, choice in enumerate(choices(job, run.generations)):
        strings.append("," if index else "")
        for string in await _choice_strings(job, index, choice, pacer):
            strings.append(string)
            if len(strings) >= _STRINGS_A_PIECE:
                pieces.append("".join(strings).encode())
                strings.clear()
                await pacer.pause_if_due()
    return [*pieces, "".join(strings).encode(), last.encode()]


async def _choice_strings(job: Job, index: int, choice: Choice, pacer: Pacer) -> list[str]:
    fields = {**job.formatter.whole(index, choice.text, choice.finish), "logprobs": None}
    if choice.logprobs is None or not choice.logprobs.waiting:
        return [json_utf8(fields)]
    logprobs = await paced_logprobs(job.formatter, choice.logprobs, pacer)
    return object_pieces(fields, "logprobs", logprobs)
