"""The sizes that bound the sequences and steps of one worker."""

from dataclasses import dataclass

from pagewire.limits import INT32_MAX
from pagewire.paging import blocks_before
from pagewire.scheduler.core.kv.host_tier import NO_HOST_MEMORY, HostMemory

# Prefill chunks of one sequence for which it may hold blocks: one that is computed and one that is
# planned behind it.
CHUNKS_HELD = 2


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker can hold and compute."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_num_batched_tokens: int
    # The share of the pool that an admission may fill while other sequences run.
    memory_threshold: float
    prefix_caching: bool = True
    # Whether the worker uses groups of decoding slots that share blocks.
    prefix_groups: bool = False
    # Whether a sequence waits until all blocks that it may ever need are free, so that none is
    # preempted.
    whole_sequences: bool = False
    # The most tokens of a sequence, prompt and output together.
    max_model_len: int = INT32_MAX
    # Steps of up to this many tokens suit piggybacked prefill; 0 for none (see WorkerInfo).
    piggyback_tokens: int = 0
    # The least share of its time that long prompts get beside decodes; 1 for no bound.
    long_prompt_share: float = 1.0
    host: HostMemory = NO_HOST_MEMORY
    # Positions that a token sees, itself included, in each layer of the model; 0 for all. Blocks
    # behind this window are released while a sequence runs.
    window: int = 0
    # The most drafts of a decode row, less than `block_size` (see WorkerInfo).
    max_drafts: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    @property
    def reach(self) -> int | None:
        """Blocks before its own that a token sees; None for all."""
        return blocks_before(self.window, self.block_size) if self.window else None

    def least_blocks(self, tokens: int) -> int:
        """The fewest blocks with which a sequence of `tokens` tokens can run alone in a pool."""
        whole = self.blocks_for(tokens)
        return whole if self.reach is None else min(whole, self.reach + 1)

    def most_blocks(self, tokens: int) -> int:
        """The most blocks that a sequence of up to `tokens` tokens holds.

        With a window, those behind it are released when the steps that see them are answered.
        """
        whole = self.blocks_for(tokens)
        if self.reach is None:
            return whole
        chunks = CHUNKS_HELD * self.blocks_for(self.max_num_batched_tokens)
        return min(whole, self.reach + 1 + chunks, self.num_blocks - 1)
