"""Log probabilities of a prompt's tokens, collected from the chunks of its prefill."""

from dataclasses import dataclass, field

import numpy as np

from pagewire.packing import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Consecutive tokens of a prompt with their log probabilities."""

    begin: int  # position of the first one in the prompt
    logprobs: Float32Array  # [n]
    ranks: Int32Array  # [n], 1 for the likeliest token
    top_ids: Int32Array  # [n, top], most likely first
    top_logprobs: Float32Array  # [n, top]


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """The log probabilities of one prompt: one for each token but the first.

    They survive a preemption: the sequence then needs only the missing ones. The first missing one
    is computed from the token before it, so that token must not come from the cache.
    """

    num_top: int
    num_prompt: int
    # Position of the first token whose log probability is missing.
    next: int = 1
    _parts: list[ScoredTokens] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether none is missing."""
        return self.next >= self.num_prompt

    def add(self, scored: ScoredTokens) -> None:
        """Adds the next tokens; ValueError if there is a gap or too few likeliest tokens."""
        end = scored.begin + len(scored.logprobs)
        if scored.begin != self.next or end > self.num_prompt:
            raise ValueError(
                f"log probabilities of the prompt tokens {scored.begin} to {end - 1}, where those "
                f"from {self.next} on were due, of {self.num_prompt} tokens"
            )
        if scored.top_ids.shape[1] < self.num_top:
            raise ValueError(
                f"{scored.top_ids.shape[1]} likeliest tokens instead of {self.num_top}"
            )
        self.next = end
        self._parts.append(scored)

    def joined(self) -> ScoredTokens:
        """All log probabilities, with `num_top` likeliest tokens each."""
        top = self.num_top
        if not self._parts:
            floats, ints = np.empty(0, np.float32), np.empty(0, np.int32)
            return ScoredTokens(1, floats, ints, ints.reshape(0, top), floats.reshape(0, top))
        return ScoredTokens(
            1,
            np.concatenate([part.logprobs for part in self._parts]),
            np.concatenate([part.ranks for part in self._parts]),
            np.concatenate([part.top_ids[:, :top] for part in self._parts]),
            np.concatenate([part.top_logprobs[:, :top] for part in self._parts]),
        )
