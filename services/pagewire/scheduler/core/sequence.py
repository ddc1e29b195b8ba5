"""One sequence: its tokens, its limits and its state."""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from pagewire.packing import Int32Array
from pagewire.sampling import SamplingNumbers
from pagewire.scheduler.core.prompt_logprobs import PromptLogprobs
from pagewire.suspicion import Loss, Suspicion

# A sequence has recovered from a failure after this many more tokens: one sampled by its prefill,
# the others decoded.
RECOVERED_AFTER = 4


class State(IntEnum):
    """The state of a sequence. The last three are final."""

    PENDING = 0
    PREFILL = 1
    DECODE = 2
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def final(self) -> bool:
        """Whether the sequence has ended."""
        return self >= State.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingNumbers):
    """How a sequence's tokens are drawn, with all defaults resolved (see SlotSampling)."""

    seed: int
    min_tokens: int
    # The number of likeliest tokens with each log probability; None for no log probabilities.
    logprobs: int | None = None
    # As in the messages: ids in ascending order as int32, and the bias of each as float32.
    bias_ids: bytes = b""
    biases: bytes = b""
    # Which tokens the output may have: a serialized Constraint; empty for any.
    constraint: bytes = b""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens generated from it.

    Invariants: `len(output) <= max_tokens`; `slot >= 0` exactly while it runs on a worker. While
    it runs, its newest tokens are in the worker's SlotTable; `output` gets them when it leaves the
    slot.
    """

    prompt: Int32Array
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    arrival: int
    priority: int = 0
    # Sequences share KV only with those of the same salt.
    cache_salt: str = ""
    output: "array[int]" = field(default_factory=lambda: array("i"))
    state: State = State.PENDING
    slot: int = -1
    # Its block table. The first `num_freed` entries are 0: their blocks are behind the model's
    # window, and it does not hold them.
    blocks: list[int] = field(default_factory=list)
    num_freed: int = 0
    # Whether it was preempted and has not started again.
    preempted: bool = False
    # At its latest start: tokens whose KV was cached, output tokens that it had, and how many of
    # the cached tokens were loaded from host memory.
    num_computed: int = 0
    num_generated: int = 0
    num_loaded: int = 0
    # At its latest start: the block to copy to that of token `num_computed`; 0 for none.
    copied_block: int = 0
    # Prompt tokens found in the cache at its first start; None before that.
    cached_tokens: int | None = None
    # Failures since it last recovered, and the length of the output at the last failure.
    failures: int = 0
    failed_at: int = -RECOVERED_AFTER
    # It may take workers down: its steps run alone until it has recovered.
    suspect: bool = False
    # Workers lost while they ran it, since it last recovered; None before the first.
    suspicion: Suspicion | None = None
    # When it was last admitted, in seconds of the caller's clock.
    admitted_at: float = 0.0
    # For policies: the tenant, and the deadline in milliseconds of the caller's clock.
    tenant: str = ""
    deadline: int = 0
    # Its number in the order of first admissions; -1 before that.
    place: int = -1
    # It generates nothing: the result is a vector of its prompt, and the only token marks its end.
    pools: bool = False
    # The vector needs every token computed in its slot, so none comes from a cache.
    whole_prompt: bool = False
    # Log probabilities of the prompt; None if none are wanted.
    prompt_logprobs: PromptLogprobs | None = None
    # The client's prediction of the output; None without one. Then its drafted tokens that were
    # right and wrong; these counts are up to date while the sequence is in no slot.
    prediction: Int32Array | None = None
    accepted_prediction: int = 0
    rejected_prediction: int = 0
    # How often it has started, and was preempted.
    num_starts: int = 0
    num_preemptions: int = 0
    # The parent of the worker's span; empty if the sequence is not traced.
    traceparent: str = ""
    # The caller's request.
    owner: Any = None

    @property
    def held(self) -> list[int]:
        """The blocks that it holds, in order."""
        return self.blocks[self.num_freed :] if self.num_freed else self.blocks

    @property
    def num_resumes(self) -> int:
        """How often it has started again after a failure; preemptions do not count."""
        return max(0, self.num_starts - 1 - self.num_preemptions)

    @property
    def num_known(self) -> int:
        """Tokens whose values are known: the prompt and the output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def num_sent(self) -> int:
        """Tokens that a worker gets when it starts: the known ones, and the prediction's."""
        return self.num_known + (0 if self.prediction is None else len(self.prediction))

    @property
    def num_answered(self) -> int:
        """Tokens whose KV is known to be computed: all but the last, once a token was sampled."""
        return self.num_known - 1 if len(self.output) > self.num_generated else 0

    def start(self, num_computed: int, copied_block: int, num_loaded: int = 0) -> None:
        """Notes what is cached when it takes a slot."""
        self.num_starts += 1
        self.num_loaded = num_loaded
        self.num_computed = num_computed
        self.copied_block = copied_block
        self.num_generated = len(self.output)
        if self.cached_tokens is None:
            self.cached_tokens = min(num_computed, len(self.prompt))

    def known_bytes(self, end: int, begin: int = 0) -> bytes:
        """The known tokens from `begin` to `end` as little-endian int32."""
        head, prompt = self.prompt[begin:end].tobytes(), len(self.prompt)
        return head + self.output[max(0, begin - prompt) : max(0, end - prompt)].tobytes()

    @property
    def max_cached(self) -> int:
        """The most tokens whose KV may come from a cache.

        The last known token must be computed, and so must every token from which a missing log
        probability of the prompt follows.
        """
        if self.whole_prompt:
            return 0
        scored = self.prompt_logprobs
        return self.num_known - 1 if scored is None or scored.complete else scored.next - 1

    @property
    def max_computed(self) -> int:
        """The most tokens whose KV is ever needed; the last token generated needs none."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def max_length(self) -> int:
        """The most tokens that it has."""
        return len(self.prompt) + (0 if self.pools else self.max_tokens)

    def recovered(self, num_output: int) -> bool:
        """Whether it has recovered from its last failure with `num_output` output tokens."""
        return num_output - self.failed_at >= RECOVERED_AFTER

    def note_loss(self, loss: Loss) -> None:
        """Notes the loss of the worker that ran it."""
        if self.suspicion is None or self.recovered(len(self.output)):
            self.suspicion = Suspicion()
        self.suspicion.add_loss(loss)
        self.failed_at = len(self.output)

    @property
    def lost_alone(self) -> bool:
        """Whether it is a suspect, and workers were lost, or may have been, while it ran alone."""
        if not self.suspect or self.suspicion is None:
            return False
        return self.suspicion.unresolved or bool(self.suspicion.crashed_trials)

    @property
    def unresolved(self) -> bool:
        """Whether it ran alone on a lost worker that may or may not have ended."""
        return self.suspicion is not None and self.suspicion.unresolved

    def may_run_on(self, lived_since: float, now: float) -> bool:
        """Whether it may run on a worker that has lived since `lived_since`."""
        return not self.lost_alone or (
            self.suspicion is not None and self.suspicion.may_be_tried(lived_since, now)
        )

    def record_failure(self) -> int:
        """Counts a failure; returns the failures since it last recovered."""
        self.failures = 1 if self.recovered(len(self.output)) else self.failures + 1
        self.failed_at = len(self.output)
        return self.failures
