"""From a checked request to its HTTP answer."""

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from pagewire.gateway.accounts import Permit
from pagewire.gateway.job import Job
from pagewire.gateway.outputs import outputs
from pagewire.gateway.reply import usage
from pagewire.gateway.run import Run
from pagewire.gateway.schedulers import Schedulers
from pagewire.gateway.sse import EventStream


async def answer(job: Job, schedulers: Schedulers, receive: Receive, permit: Permit) -> Response:
    """Runs a job. Raises RequestError or ClientGoneError for what happens before the first byte.

    A streamed answer begins with its first news, so that a request which is refused in the queue
    still gets a status of its own.
    """
    run = Run(job, schedulers)
    permit.generations = run.generations
    run.start(receive)
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
    choices = [
        {**job.reply.whole(index, output.text, output.finish), "logprobs": output.logprobs}
        for index, output in enumerate(outputs(job, run.generations))
    ]
    return JSONResponse(job.reply.envelope.wrap(choices, usage=usage(run.generations)))
