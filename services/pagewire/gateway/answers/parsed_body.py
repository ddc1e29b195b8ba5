"""The body of a chat with reasoning or tool calls that is not streamed."""

from pagewire.gateway.answers.paced_json import object_pieces, paced_logprobs
from pagewire.gateway.answers.parsed_output import ParsedOutput
from pagewire.gateway.answers.prompt_logprobs import last_strings
from pagewire.gateway.answers.run import Run
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.chat_output import message_of, with_calls
from pagewire.gateway.api.formatting import json_utf8, usage
from pagewire.gateway.api.job import Job
from pagewire.gateway.details.written_details import detailed_choice, details_beside_choices
from pagewire.gateway.generation.pacer import Pacer


async def parsed_body(job: Job, run: Run) -> list[bytes]:
    """The body in pieces; every generation has finished, and each is a choice."""
    formatter, pacer = job.formatter, Pacer()
    assert isinstance(formatter, ChatFormatter)
    parsed = ParsedOutput(job.output)
    choices: list[bytes] = []
    for index, generation in enumerate(run.generations):
        finish = generation.finish
        assert finish is not None
        events = await parsed.take(generation, pacer)
        message = formatter.message(index, message_of(events, parsed.short_ids), finish)
        choice = with_calls(message, finish, parsed.has_calls(generation))
        strings = [json_utf8(choice)]
        log = generation.logprobs
        if log is not None and log.waiting:
            logprobs = await paced_logprobs(formatter, [log], pacer)
            strings = object_pieces(choice, "logprobs", logprobs)
        if job.details is not None:
            strings = await detailed_choice(
                job.details, strings, generation.tokens, generation.prompt, pacer
            )
        choices.append((("," if index else "") + "".join(strings)).encode())
        await pacer.pause_if_due()
    counts = usage(run.generations, parsed.reasoning_tokens(run.generations))
    envelope = formatter.envelope.wrap([], usage=counts)
    first, last = "".join(object_pieces(envelope, "choices", ["[\0]"])).split("\0")
    if job.details is not None:
        beside = await details_beside_choices(job.details, run.generations[0], pacer)
        first = "".join(["{", *beside, first.removeprefix("{")])
    ends = await last_strings(job, run, last, pacer)
    return [first.encode(), *choices, *(string.encode() for string in ends)]
