"""From a checked request to its HTTP answer."""

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from pagewire.gateway.accounts import Permit
from pagewire.gateway.job import Job
from pagewire.gateway.reply import whole_body
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
    return JSONResponse(whole_body(job.reply, run.generations))
