"""What one HTTP request costs its key."""

from collections.abc import Callable, Sequence
from itertools import groupby

from pagewire.auth.accounts import AccountedRequest
from pagewire.auth.costs import NO_COST, Cost, cost_of
from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation


class Bill:
    """The tokens of a request: reserved before it runs, replaced by the true number at its end.

    The true number is that of `usage`: each prompt once, and the outputs of all candidates. Where
    a generation was given up, its scheduler says soon after the end what it had used.
    """

    def __init__(
        self, visit: AccountedRequest, job: Job, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        """Reserves; RequestError if the key does not have as much."""
        self._visit = visit
        self._clock = clock
        self._generations: Sequence[Generation] = ()
        self._closed = False
        # By prompt.
        self._costs = [
            cost_of(request, common.tokens, max_model_len, job.candidates)
            for request, common in zip(job.requests[:: job.candidates], job.inputs, strict=True)
        ]
        visit.reserve(len(job.requests), sum(self._costs, NO_COST), clock())

    def follow(self, generations: Sequence[Generation]) -> None:
        """These are what the request runs as."""
        self._generations = generations
        for generation in generations:
            generation.on_use = self._heard

    def close(self) -> None:
        """The request has ended; called once."""
        self._closed = True
        self._visit.end(self._used(), self._clock())
        self._forget()

    def _heard(self) -> None:
        if self._closed:
            self._visit.correct(self._used(), self._clock())
            self._forget()

    def _forget(self) -> None:
        """Lets go of generations of which nothing more is to be heard."""
        if all(generation.settled for generation in self._generations):
            for generation in self._generations:
                generation.on_use = None
            self._generations = ()

    def _used(self) -> int:
        families = groupby(self._generations, key=lambda generation: generation.prompt)
        return sum(used(list(family), self._costs[prompt]) for prompt, family in families)


def used(family: Sequence[Generation], cost: Cost) -> int:
    """Tokens that the generations of one prompt have used, by what is known of them by now.

    A prompt that was given up on its way to its first token is taken at its estimate, and so are
    the outputs of a beam search, until its scheduler has said what they were.
    """
    prompt = max((generation.used_prompt_tokens for generation in family), default=0)
    unheard = [generation for generation in family if generation.unheard]
    if not prompt and unheard:
        prompt = cost.prompt
    searches = sum(g.request.HasField("beam_search") for g in unheard)
    return prompt + searches * cost.output + sum(g.used_tokens for g in family)
