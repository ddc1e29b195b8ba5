"""The limits of a worker: slots, blocks, tokens of a step and of a sequence."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.paging import blocks_before
from pagewire.worker.errors import SetupError
from pagewire.worker.protocol.steps.forced_texts import ForcedTexts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a worker.

    Block 0 is the scratch block; no sequence has it. Slot `num_slots` is the padding slot. Its
    block table is all 0, so the KV of padding rows goes to the scratch block.
    """

    vocab_size: int
    num_slots: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    host_blocks: int = 0  # blocks in the host's memory, numbered from 0
    window: int = 0  # see WorkerInfo in worker.proto
    max_drafts: int = 0  # of a decode row; 0: no speculation
    # The time of a draft model's step, as a part of the model's step without drafts. None: no draft
    # model.
    draft_cost: float | None = None
    draft_model: bool = False  # whether a draft model or an EAGLE head makes drafts
    # In a benchmark, the only prompts that are accepted, and their outputs; see forced_texts.py.
    forced: ForcedTexts | None = None
    # Whether the device makes drafts and keeps the positions, while steps run ahead of results.
    drafts_on_device: bool = False

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence, which is the number of columns of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def padding_slot(self) -> int:
        """The slot of padding rows."""
        return self.num_slots


def longest_sequence(trained: int, requested: int | None) -> int:
    """The maximum tokens of a sequence: `requested` (--max-model-len), else the model's maximum.

    `trained` is `max_position_embeddings` of the model.

    Raises:
        SetupError: `requested` exceeds it.
    """
    if requested is not None and not 1 <= requested <= trained:
        raise SetupError(
            f"max_model_len {requested}: config.json allows 1 to {trained} "
            "(max_position_embeddings)"
        )
    return requested or trained


def kept_window(
    windows: Sequence[int | None], longest: int, host_blocks: int = 0, max_drafts: int = 0
) -> int:
    """`Limits.window` of a model with these windows of its layers: positions, or None for all.

    It is 0 if no sequence exceeds the window; with host memory, which holds the beginning of every
    cached text; and with drafts, whose sequences advance by unknown numbers of tokens.
    """
    largest = max((longest if window is None else window for window in windows), default=longest)
    if largest >= longest:
        return 0
    if host_blocks or max_drafts:
        log.info(
            "KV behind the window of %d tokens stays allocated, because of %s",
            largest,
            "--host-memory-gb" if host_blocks else "--speculate",
        )
        return 0
    return largest


def fit_to_pool(
    longest: int,
    requested: int | None,
    num_blocks: int,
    block_size: int,
    block_bytes: int,
    window: int = 0,
) -> int:
    """The longest sequence that fits into a pool of `num_blocks`, at most `longest` tokens.

    With a `window` (`kept_window`) any sequence fits, if the pool holds a window.

    Raises:
        SetupError: `requested`, the value of --max-model-len, does not fit, or no block does.
    """
    held = (num_blocks - 1) * block_size  # block 0 is scratch
    least = blocks_before(window, block_size) + 1 if window else num_blocks
    if held >= longest or least < num_blocks:
        return longest
    if requested is not None or held < 1:
        needed = -(-(requested or 1) // block_size) + 1
        if window:
            needed = min(needed, least + 1)
        raise SetupError(
            f"a KV pool of {num_blocks} blocks holds {held} tokens, too few for one sequence of "
            f"{requested or 1}: it needs {needed} blocks ({needed * block_bytes / 2**20:.1f} MiB); "
            "give it more memory (--num-blocks, --cpu-kv-bytes or --gpu-memory-utilization) or "
            "lower --max-model-len"
        )
    log.info("max_model_len is %d instead of %d: the KV pool holds no more tokens", held, longest)
    return held
