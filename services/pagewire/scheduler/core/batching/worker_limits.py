"""The sizes that bound the sequences and steps of one worker."""

from dataclasses import dataclass

from pagewire.limits import INT32_MAX
from pagewire.scheduler.core.kv.host_tier import NO_HOST_MEMORY, HostMemory


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
    # Whether the worker makes use of groups of decoding slots that share blocks.
    prefix_groups: bool = False
    # Whether a sequence waits until all blocks that it may ever need are free, so that none is
    # preempted.
    whole_sequences: bool = False
    # The most tokens of a sequence, prompt and output together.
    max_model_len: int = INT32_MAX
    # Steps of up to so many tokens suit piggybacked prefill; 0 for none (see WorkerInfo).
    piggyback_tokens: int = 0
    host: HostMemory = NO_HOST_MEMORY
    # The most drafts of a decode row, less than `block_size` (see WorkerInfo).
    max_drafts: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)
