"""Which writer formats a job's stream."""

from collections.abc import Sequence

from pagewire.errors import RequestError
from pagewire.gateway.answers.named_events import NamedEventWriter
from pagewire.gateway.answers.parsed_sse import ParsedChunkWriter
from pagewire.gateway.answers.sse import ChunkWriter, Writer
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.formatting import PooledForm
from pagewire.gateway.api.job import Job
from pagewire.gateway.details.details import Details
from pagewire.gateway.details.written_details import DetailedEvents
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer


def writer_of(job: Job) -> Writer:
    """A writer for the answer of one job."""
    if isinstance(job.formatter, AnswerForm):
        return NamedEventWriter(job.formatter, job.output)
    assert not isinstance(job.formatter, PooledForm), "vectors are not streamed"
    counts_come_last = not (job.details and job.details.usage)
    writer: Writer = ChunkWriter(job.formatter, job.include_usage, counts_come_last)
    if job.output is not None and isinstance(job.formatter, ChatFormatter):
        writer = ParsedChunkWriter(job.formatter, job.output, job.include_usage, counts_come_last)
    return writer if job.details is None else DetailedWriter(writer, job.details)


class DetailedWriter:
    """Adds details to the events of another writer."""

    def __init__(self, writer: Writer, details: Details) -> None:
        self._writer = writer
        self._events = DetailedEvents(details)

    async def write_paced(self, generation: Generation, pacer: Pacer) -> list[str]:
        """See `Writer`."""
        written = await self._writer.write_paced(generation, pacer)
        return await self._events.add_to(written, generation, pacer)

    def closing(self, generations: Sequence[Generation]) -> str:
        """See `Writer`."""
        return self._writer.closing(generations)

    def failure(self, error: RequestError) -> str:
        """See `Writer`."""
        return self._writer.failure(error)
