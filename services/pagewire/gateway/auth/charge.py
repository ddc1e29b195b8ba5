"""The cost of one HTTP request for its key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pagewire.auth.accounts import AccountedRequest
from pagewire.auth.costs import NO_COST, Cost, cost_of
from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation


class Charge:
    """The tokens of one request: an estimate while it runs, then the tokens that it has used.

    As in `usage`, each prompt counts once, and the outputs of all candidates count. The scheduler
    reports the usage of an aborted generation soon after its end. The work for a report does not
    depend on the number of generations in the request.
    """

    def __init__(
        self, visit: AccountedRequest, job: Job, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        """Reserves the estimate; RequestError if the key has fewer tokens left."""
        self._visit = visit
        self._clock = clock
        self._generations: Sequence[Generation] = ()
        # Counted tokens of generations whose usage report arrives after the request's end.
        self._awaited: dict[Generation, _Counted] = {}
        self._used = 0
        # One entry for each prompt.
        costs = [
            cost_of(request, common.tokens, max_model_len, job.candidates)
            for request, common in zip(job.requests[:: job.candidates], job.common, strict=True)
        ]
        self._prompts = [_PromptUse(cost) for cost in costs]
        visit.reserve(len(job.requests), sum(costs, NO_COST), clock())

    def follow(self, generations: Sequence[Generation]) -> None:
        """Watches the usage of the request's generations."""
        self._generations = generations

    def close(self) -> None:
        """Replaces the estimate by the used tokens when the request has ended; called once."""
        for generation in self._generations:
            counted = _Counted.of(generation)
            self._prompts[generation.prompt_index].add(counted)
            if not generation.usage_final:
                self._awaited[generation] = counted
                generation.on_usage = partial(self._usage_reported, generation)
        self._generations = ()
        self._used = sum(prompt.tokens for prompt in self._prompts)
        self._visit.end(self._used, self._clock())

    def _usage_reported(self, generation: Generation) -> None:
        prompt = self._prompts[generation.prompt_index]
        before = prompt.tokens
        prompt.remove(self._awaited.pop(generation))
        prompt.add(_Counted.of(generation))
        self._used += prompt.tokens - before
        self._visit.correct(self._used, self._clock())
        generation.on_usage = None


@dataclass(frozen=True, slots=True)
class _Counted:
    """The tokens of one generation, as far as known."""

    prompt: int
    outputs: int
    pending: bool  # its scheduler has yet to report its usage
    searched: bool  # pending, and a beam search

    @classmethod
    def of(cls, generation: Generation) -> "_Counted":
        pending = generation.usage_pending
        return cls(
            generation.used_prompt_tokens,
            generation.used_tokens,
            pending,
            pending and generation.request.HasField("beam_search"),
        )


@dataclass(slots=True)
class _PromptUse:
    """The tokens that one prompt and its candidates have used, as far as known."""

    cost: Cost
    prompt: int = 0
    outputs: int = 0
    pending: int = 0
    searches: int = 0

    @property
    def tokens(self) -> int:
        """The tokens. Until the scheduler reports an aborted generation, this contains estimates:
        of a prompt without a first token, and of the outputs of a beam search."""
        prompt = self.prompt or (self.cost.prompt if self.pending else 0)
        return prompt + self.searches * self.cost.output + self.outputs

    def add(self, counted: _Counted) -> None:
        """Counts one more generation."""
        self.prompt = max(self.prompt, counted.prompt)
        self.outputs += counted.outputs
        self.pending += counted.pending
        self.searches += counted.searched

    def remove(self, counted: _Counted) -> None:
        """Subtracts a counted generation, except its prompt, which others may have reported."""
        self.outputs -= counted.outputs
        self.pending -= counted.pending
        self.searches -= counted.searched
