"""Long prompts beside other sequences: how much of a step, and of a worker's time, they get."""

from collections.abc import Sized

from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits

# A prompt is long if it takes more than this many full steps.
FULL_STEPS = 4
# Beside others, chunks of long prompts get one of this many parts of a step.
PARTS_OF_STEP = 4


class LongPrompts:
    """The slots that compute long prompts, and whose turn it is: theirs, or that of the decodes.

    A step with a long prompt's chunk may take as long as a hundred steps of decodes. So after such
    a step, decodes are owed a multiple of its time, in steps without long prompts. Until then no
    further chunk is planned beside them. The multiple leaves long prompts `long_prompt_share` of
    the time, and up to half of it where there are few decodes for each long prompt and waiting
    request. If long prompts and waiting requests outnumber the decodes, decodes wait for each
    chunk: the throughput of prompts matters most then.
    """

    __slots__ = (
        "_full",
        "_most_owed",
        "_owed_us",
        "_unanswered",
        "_waiting",
        "chunk_tokens",
        "slots",
    )

    def __init__(self, limits: WorkerLimits, waiting: Sized) -> None:
        """`waiting` are the sequences that wait for admission."""
        self._waiting = waiting
        # In the order of their admission.
        self.slots: list[int] = []
        # The most tokens of long prompts in a step beside decodes or other prompts.
        self.chunk_tokens = max(1, limits.max_num_batched_tokens // PARTS_OF_STEP)
        self._full = FULL_STEPS * limits.max_num_batched_tokens
        share = limits.long_prompt_share
        self._most_owed = (1 - share) / share
        # Microseconds of steps without long prompts that decodes are owed.
        self._owed_us = 0.0
        # The step in flight that has a long prompt beside decodes; 0 for none.
        self._unanswered = 0

    @property
    def may_go_on(self) -> bool:
        """Whether the next chunk may be planned beside decodes."""
        return not self._unanswered and self._owed_us <= 0

    def take_turns(self, decodes: int) -> bool:
        """Whether chunks take turns with this number of decodes."""
        return bool(self.slots) and decodes >= self._heads

    @property
    def _heads(self) -> int:
        return len(self.slots) + len(self._waiting)

    def add(self, slot: int, tokens: int) -> None:
        """Adds a slot if its `tokens` to compute make it a long prompt."""
        if self._most_owed and tokens > self._full:
            self.slots.append(slot)

    def discard(self, slot: int) -> None:
        """Removes a slot that has computed its prompt, or leaves, if it is here."""
        if slot in self.slots:
            self.slots.remove(slot)

    def sent(self, plan: StepPlan) -> None:
        """Notes that a step has a chunk of a long prompt beside decodes."""
        self._unanswered = plan.number

    def answered(self, plan: StepPlan, duration_us: int) -> None:
        """Takes the time of the oldest step in flight, 0 if it is not known."""
        decodes = len(plan.decode_slots)
        if plan.number == self._unanswered:
            self._unanswered = 0
            most = min(self._most_owed, decodes / self._heads) if self.slots else 0.0
            self._owed_us = duration_us * most
        elif self._owed_us > 0:
            paid = decodes > 0 and duration_us > 0
            self._owed_us = self._owed_us - duration_us if paid else 0.0
