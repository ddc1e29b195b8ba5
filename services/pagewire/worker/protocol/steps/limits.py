"""The sizes that bound every step of a worker."""

import logging
from dataclasses import dataclass

from pagewire.worker.errors import SetupError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of slots, blocks and steps.

    Block 0 is scratch and given to no sequence. Slot `num_slots` is the padding slot: its block
    table is all 0, so whatever is computed for it lands in the scratch block.
    """

    vocab_size: int
    num_slots: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    host_blocks: int = 0  # in the host's memory, numbered from 0

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence: columns of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def padding_slot(self) -> int:
        """The slot of rows that belong to no sequence."""
        return self.num_slots


def longest_sequence(trained: int, window: int | None, wanted: int | None) -> int:
    """Tokens that a sequence may have by the model's configuration and `--max-model-len`.

    `trained` is the configuration's max_position_embeddings, `window` its sliding window.

    Attention here sees the whole sequence, which equals a sliding window as long as no sequence
    is longer than the window.
    """
    if wanted is not None and not 1 <= wanted <= trained:
        raise SetupError(
            f"max_model_len {wanted}: config.json allows 1 to {trained} (max_position_embeddings)"
        )
    if window is None or window >= (wanted or trained):
        return wanted or trained
    if wanted is not None:
        raise SetupError(
            f"max_model_len {wanted} exceeds the model's sliding window of {window} tokens, which "
            f"is not implemented; use --max-model-len {window} or less"
        )
    log.info("max_model_len is %d, the model's sliding window, instead of %d", window, trained)
    return window


def fit_to_pool(
    longest: int, wanted: int | None, num_blocks: int, block_size: int, block_bytes: int
) -> int:
    """The longest sequence that a pool of `num_blocks` holds, `longest` at most.

    SetupError if the pool cannot hold the length that was asked for, or no block at all.
    """
    held = (num_blocks - 1) * block_size  # block 0 is scratch
    if held >= longest:
        return longest
    if wanted is not None or held < 1:
        needed = -(-(wanted or 1) // block_size) + 1
        raise SetupError(
            f"a KV pool of {num_blocks} blocks holds {held} tokens, too few for one sequence of "
            f"{wanted or 1}: it needs {needed} blocks ({needed * block_bytes / 2**20:.1f} MiB); "
            "give it more memory (--num-blocks, --cpu-kv-bytes or --gpu-memory-utilization) or "
            "lower --max-model-len"
        )
    log.info("max_model_len is %d, as many tokens as the pool holds, instead of %d", held, longest)
    return held
