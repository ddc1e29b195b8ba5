"""What one HTTP request costs its key."""

from collections.abc import Callable, Sequence
from itertools import groupby

from pagewire.auth.accounts import AccountedRequest
from pagewire.auth.costs import NO_COST, Cost, cost_of
from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation


class Charge:
    """The tokens of one request: an estimate while it runs, then the tokens that it has used.

    They are counted as `usage` counts them: each prompt once, and the outputs of all candidates.
    For an aborted generation the scheduler reports its usage soon after the end.
    """

    def __init__(
        self, visit: AccountedRequest, job: Job, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        """Reserves the estimate; RequestError if the key has fewer tokens left."""
        self._visit = visit
        self._clock = clock
        self._generations: Sequence[Generation] = ()
        self._closed = False
        # One entry for each prompt.
        self._costs = [
            cost_of(request, common.tokens, max_model_len, job.candidates)
            for request, common in zip(job.requests[:: job.candidates], job.common, strict=True)
        ]
        visit.reserve(len(job.requests), sum(self._costs, NO_COST), clock())

    def follow(self, generations: Sequence[Generation]) -> None:
        """Watches the usage of the request's generations."""
        self._generations = generations
        for generation in generations:
            generation.on_usage = self._usage_reported

    def close(self) -> None:
        """Replaces the estimate when the request has ended; called once."""
        self._closed = True
        self._visit.end(self._used(), self._clock())
        self._release_generations()

    def _usage_reported(self) -> None:
        if self._closed:
            self._visit.correct(self._used(), self._clock())
            self._release_generations()

    def _release_generations(self) -> None:
        """Drops the generations once no report is pending, so that their memory is freed."""
        if all(generation.usage_final for generation in self._generations):
            for generation in self._generations:
                generation.on_usage = None
            self._generations = ()

    def _used(self) -> int:
        by_prompt = groupby(self._generations, key=lambda generation: generation.prompt_index)
        return sum(
            used_tokens(list(candidates), self._costs[prompt]) for prompt, candidates in by_prompt
        )


def used_tokens(candidates: Sequence[Generation], cost: Cost) -> int:
    """The tokens that one prompt and its candidates have used, as far as known.

    Until the scheduler reports an aborted generation, estimates stand in: for a prompt without a
    first token, and for the outputs of a beam search.
    """
    prompt = max((generation.used_prompt_tokens for generation in candidates), default=0)
    pending = [generation for generation in candidates if generation.usage_pending]
    if not prompt and pending:
        prompt = cost.prompt
    searches = sum(generation.request.HasField("beam_search") for generation in pending)
    outputs = sum(generation.used_tokens for generation in candidates)
    return prompt + searches * cost.output + outputs
