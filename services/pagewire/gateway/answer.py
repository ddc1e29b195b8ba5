"""From a checked request to its HTTP answer."""

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagewire.gateway.bill import Bill
from pagewire.gateway.job import Job
from pagewire.gateway.outputs import outputs
from pagewire.gateway.reply import usage
from pagewire.gateway.run import Run
from pagewire.gateway.schedulers import Schedulers
from pagewire.gateway.sse import EventStream

# As much as a connection holds before it asks to wait.
_PIECE_BYTES = 64 << 10


class PacedJson(JSONResponse):
    """JSON that is handed to the connection piece by piece, as the client takes it.

    What a connection has been given as a whole counts as sent, and behind TLS it would be closed
    after some time, whether or not a slow client has read it.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends head and body."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        body = bytes(self.body)
        for begin in range(0, len(body), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            piece = {"type": "http.response.body", "body": body[begin:end]}
            await send({**piece, "more_body": end < len(body)})


async def answer(job: Job, schedulers: Schedulers, receive: Receive, bill: Bill | None) -> Response:
    """Runs a job. Raises RequestError or ClientGoneError for what happens before the first byte.

    A streamed answer begins with its first news, so that a request which is refused in the queue
    still gets a status of its own.
    """
    run = Run(job, schedulers)
    if bill is not None:
        bill.follow(run.generations)
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
    return PacedJson(job.reply.envelope.wrap(choices, usage=usage(run.generations)))
