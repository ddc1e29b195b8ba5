"""Which writer formats a job's stream."""

from pagewire.gateway.answers.named_events import NamedEventWriter
from pagewire.gateway.answers.parsed_sse import ParsedChunkWriter
from pagewire.gateway.answers.sse import ChunkWriter, Writer
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.job import Job


def writer_of(job: Job) -> Writer:
    """A writer for the answer of one job."""
    if isinstance(job.formatter, AnswerForm):
        return NamedEventWriter(job.formatter, job.output)
    # With token counts in every chunk there is no chunk that says that they come later.
    announces_usage = job.include_usage and not (job.details and job.details.usage)
    if job.output is not None and isinstance(job.formatter, ChatFormatter):
        return ParsedChunkWriter(job.formatter, job.output, announces_usage)
    return ChunkWriter(job.formatter, announces_usage)
