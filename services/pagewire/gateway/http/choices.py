"""Which of an answer's generations become its choices."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import LogprobLog
from pagewire.v1 import inference_pb2 as pb


class Output(NamedTuple):
    """One choice, complete."""

    text: str
    finish: pb.Finish
    logprobs: LogprobLog | None


def outputs(job: Job, generations: Sequence[Generation]) -> Iterator[Output]:
    """`job.n` choices of each prompt, prompt by prompt; every generation has finished.

    Of more candidates than choices those with the highest log probability per token are taken,
    best first. A beam search is one generation with all choices.
    """
    for _, siblings in groupby(generations, key=lambda g: g.prompt):
        candidates = list(siblings)
        if len(candidates) > job.n:
            candidates.sort(key=_mean_logprob, reverse=True)
        for generation in candidates[: job.n]:
            yield from _outputs_of(job, generation)


def _mean_logprob(generation: Generation) -> float:
    assert generation.finish is not None
    return generation.finish.cumulative_logprob / max(1, len(generation.tokens))


def _outputs_of(job: Job, generation: Generation) -> Iterator[Output]:
    finish = generation.finish
    assert finish is not None
    for hypothesis in finish.hypotheses:
        stop_id = hypothesis.stop_token_id if hypothesis.HasField("stop_token_id") else None
        ended = pb.Finish(reason=hypothesis.reason, stop_token_id=stop_id)
        yield Output(hypothesis.text, ended, None)
    if not finish.hypotheses:
        logprobs = generation.logprobs if job.shows_logprobs else None
        yield Output(generation.take_text(), finish, logprobs)
