"""Which generations of a job become choices of its answer."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import LogprobLog
from pagewire.gateway.generation.prompt_log import PromptLog
from pagewire.v1 import inference_pb2 as pb


class Choice(NamedTuple):
    """One complete choice."""

    text: str
    finish: pb.Finish
    logprobs: LogprobLog | None
    token_ids: "Sequence[int] | array[int]"
    prompt: PromptLog | None = None


def choices(job: Job, generations: Sequence[Generation]) -> Iterator[Choice]:
    """`job.n` choices for each prompt, prompt by prompt. Every generation must have finished.

    If a prompt has more than `job.n` candidates, those with the highest log probability per token
    are chosen, the best one first. A beam search is one generation that has all choices.
    """
    for _, by_prompt in groupby(generations, key=lambda generation: generation.prompt_index):
        candidates = list(by_prompt)
        if len(candidates) > job.n:
            candidates.sort(key=_mean_logprob, reverse=True)
        for generation in candidates[: job.n]:
            yield from _choices_of(job, generation)


def _mean_logprob(generation: Generation) -> float:
    assert generation.finish is not None
    return generation.finish.cumulative_logprob / max(1, len(generation.tokens))


def _choices_of(job: Job, generation: Generation) -> Iterator[Choice]:
    finish = generation.finish
    assert finish is not None
    for hypothesis in finish.hypotheses:
        stop_id = hypothesis.stop_token_id if hypothesis.HasField("stop_token_id") else None
        ended = pb.Finish(reason=hypothesis.reason, stop_token_id=stop_id)
        yield Choice(hypothesis.text, ended, None, hypothesis.token_ids, generation.prompt)
    if not finish.hypotheses:
        logprobs = generation.logprobs if job.shows_logprobs else None
        yield Choice(generation.take_text(), finish, logprobs, generation.tokens, generation.prompt)
