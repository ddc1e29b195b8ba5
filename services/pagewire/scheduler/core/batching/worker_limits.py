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
    memory_threshold: float
    prefix_caching: bool = True
    # Whether the worker wants to be told which decoding slots share blocks.
    prefix_groups: bool = False
    # Whether a sequence waits until all that it may ever need is free: then nobody is preempted.
    whole_sequences: bool = False
    # The most tokens of a sequence, prompt and output together.
    max_model_len: int = INT32_MAX
    # Piggybacked prefill keeps steps at this many tokens; 0 turns it off. See WorkerInfo.
    piggyback_tokens: int = 0
    # Where cached KV goes when its blocks on the device are needed.
    host: HostMemory = NO_HOST_MEMORY

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)
