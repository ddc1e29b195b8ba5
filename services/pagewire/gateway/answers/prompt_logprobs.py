"""The log probabilities of a prompt in the body of an answer."""

from typing import TypeGuard

from pagewire.gateway.answers.paced_json import paced_prompt_logprobs
from pagewire.gateway.answers.run import Run
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.formatting import PooledForm
from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.generation.prompt_log import PromptLog


async def last_strings(job: Job, run: Run, last: str, pacer: Pacer) -> list[str]:
    """The end of a body, `last`, with the prompt's log probabilities if they belong there."""
    prompt = run.generations[0].prompt
    formatter = job.formatter
    assert not isinstance(formatter, AnswerForm | PooledForm)
    if formatter.prompt_logprobs_in_choices or not has_logprobs(prompt):
        return [last]
    written = await paced_prompt_logprobs(prompt, pacer)
    return [last.removesuffix("}"), ',"prompt_logprobs":', *written, "}"]


def has_logprobs(prompt: PromptLog | None) -> TypeGuard[PromptLog]:
    """Whether the answer has the field `prompt_logprobs` for a prompt."""
    return prompt is not None and prompt.wishes.top is not None
