"""Log probabilities of prompt tokens: their rows in chunks, and the fields of the answer.

The row of token `i` predicts token `i + 1`. A row is wanted if that next token belongs to the
prompt.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Float32Array, Int32Array, pack, pack_floats
from pagewire.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The wanted rows of the chunks of a step, at least one; chunks without any are left out."""

    slots: Int32Array  # [chunks]
    starts: Int32Array  # [chunks + 1], offsets into `rows`
    lengths: Int32Array  # [chunks], KV tokens that the last wanted row of the chunk attends to
    rows: Int32Array  # [rows], indices into `Chunks.tokens`; those of a chunk are consecutive
    targets: Int32Array  # [rows], the token that follows each
    num_top: int  # likeliest tokens, the maximum over the chunks

    @property
    def counts(self) -> Int32Array:
        """Wanted rows of each chunk, `[chunks]`."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of `PromptRows.targets`."""

    rows: PromptRows
    chosen: Float32Array  # [rows]
    ranks: Int32Array  # [rows], 1 for the likeliest token
    top_ids: Int32Array  # [rows, num_top], most likely first
    top: Float32Array  # [rows, num_top]

    def message(self, failed: NDArray[np.bool_]) -> pb.PromptLogprobs | None:
        """The field of a StepResult; None if all of `PromptRows.slots` have `failed [chunks]`."""
        rows, sound = self.rows, ~failed
        if not sound.any():
            return None
        counts = rows.counts
        kept = np.repeat(sound, counts)
        return pb.PromptLogprobs(
            slots=pack(rows.slots[sound]),
            # The first wanted row is at `lengths - counts`; it predicts the token after it.
            begins=pack((rows.lengths - counts + 1)[sound]),
            counts=pack(counts[sound]),
            logprobs=pack_floats(self.chosen[kept]),
            ranks=pack(self.ranks[kept]),
            top_ids=pack(self.top_ids[kept]),
            top_logprobs=pack_floats(self.top[kept]),
        )


class PromptRowsBuilder:
    """Collects the wanted rows of a step, chunk after chunk."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._lengths: list[int] = []
        self._rows: list[Int32Array] = []
        self._targets: list[Int32Array] = []
        self._num_top = 0

    def add(self, slot: int, begin: int, tokens: Int32Array, first_row: int, num_top: int) -> None:
        """Adds the wanted rows of a chunk.

        Args:
            slot: the slot of the chunk.
            begin: the position of the first wanted row in the sequence.
            tokens: `[rows + 1]`, the wanted rows and the token after them.
            first_row: the index of the first wanted row in `Chunks.tokens`.
            num_top: likeliest tokens of each.
        """
        count = len(tokens) - 1
        self._slots.append(slot)
        self._lengths.append(begin + count)
        self._rows.append(np.arange(first_row, first_row + count, dtype=np.int32))
        self._targets.append(tokens[1:])
        self._num_top = max(self._num_top, num_top)

    def build(self) -> PromptRows | None:
        """The rows of all chunks; None if there are none."""
        if not self._slots:
            return None
        starts = np.zeros(len(self._slots) + 1, np.int32)
        np.cumsum([len(rows) for rows in self._rows], out=starts[1:])
        return PromptRows(
            slots=np.array(self._slots, np.int32),
            starts=starts,
            lengths=np.array(self._lengths, np.int32),
            rows=np.concatenate(self._rows),
            targets=np.concatenate(self._targets),
            num_top=self._num_top,
        )
