"""From a checked request to its HTTP answer."""

from starlette.responses import Response
from starlette.types import Receive

from pagewire.gateway.api.formatting import usage
from pagewire.gateway.api.job import Job
from pagewire.gateway.auth.bill import Bill
from pagewire.gateway.generation.turns import Turns
from pagewire.gateway.http.choices import Output, outputs
from pagewire.gateway.http.paced_json import PacedJson, paced_logprobs, readable, spliced
from pagewire.gateway.http.run import Run
from pagewire.gateway.http.sse import EventStream
from pagewire.gateway.routing.schedulers import Schedulers

_STRINGS_A_PIECE = 16  # each has some kilobytes at most, or one output's text


async def answer(
    job: Job, schedulers: Schedulers, receive: Receive, bill: Bill | None, arrived: float
) -> Response:
    """Runs a job that `arrived` at a time of time.perf_counter().

    Raises RequestError or ClientGoneError for what happens before the first byte.

    A streamed answer begins with its first news, so that a request which is refused in the queue
    still gets a status of its own.
    """
    run = Run(job, schedulers, arrived)
    if bill is not None:
        bill.follow(run.generations)
    await run.start(receive)
    try:
        news = await run.news()
        if job.stream:
            return EventStream(run, news, job.reply, job.include_usage)
        while not run.finished:
            await run.news()
    except BaseException:
        run.close()
        raise
    run.close()
    return PacedJson(await _whole(job, run))


async def _whole(job: Job, run: Run) -> list[bytes]:
    """The body of an answer that is not streamed, in pieces."""
    turns = Turns()
    envelope = job.reply.envelope.wrap([], usage=usage(run.generations))
    first, last = "".join(spliced(envelope, "choices", ["[\0]"])).split("\0")
    pieces = [first.encode()]
    waiting: list[str] = []
    for index, output in enumerate(outputs(job, run.generations)):
        waiting.append("," if index else "")
        for string in await _choice(job, index, output, turns):
            waiting.append(string)
            if len(waiting) >= _STRINGS_A_PIECE:
                pieces.append("".join(waiting).encode())
                waiting.clear()
                await turns.give()
    return [*pieces, "".join(waiting).encode(), last.encode()]


async def _choice(job: Job, index: int, output: Output, turns: Turns) -> list[str]:
    choice = {**job.reply.whole(index, output.text, output.finish), "logprobs": None}
    if output.logprobs is None or not output.logprobs.waiting:
        return [readable(choice)]
    return spliced(choice, "logprobs", await paced_logprobs(job.reply, output.logprobs, turns))
