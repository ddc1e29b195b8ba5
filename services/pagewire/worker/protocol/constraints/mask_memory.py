"""The memory that a worker and its mask processes share: masks of all slots, and their progress.

Each slot belongs to one mask process, which writes the slot's entries. The sequences of a slot
differ by their generation, a number that grows. A *stamp* is a generation and the index of a token
in the output, as one number. It grows with each token of a sequence, and from one sequence of the
slot to the next. So "the mask is ready" is a comparison of two numbers, for all rows of a step at
once.
"""

import mmap
import os
from itertools import accumulate
from math import prod
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX

# The most forced tokens that are kept for a sequence; no row has more drafts.
MAX_FORCED = 64
MESSAGE_BYTES = 4096

MAX_PROCESSES = 64
TOKEN_STEPS = 16  # whose tokens fit into the ring at the same time

# Each mask begins at a multiple of this many words: 128 bytes, which a device reads at once.
ALIGNED_WORDS = 32

_PAGE = 4096


def stamp(generation: int, index: int) -> int:
    """The stamp of the token at `index` of a sequence; -1 is before the first token."""
    return (generation << 32) + index


def last_stamp(generation: int) -> int:
    """The stamp of a sequence that has ended or failed: no step waits for it any more."""
    return stamp(generation, INT32_MAX)


# Taking a lock orders the stores before it and after it, on every kind of processor.
FENCE = Lock()


class MaskMemory:
    """Arrays in memory without a file.

    A writer stores the data first, then passes `FENCE`, then stores the stamp.
    """

    def __init__(self, slots: int, words: int, fd: int | None = None) -> None:
        """A mask has `words` of 32 bits. `fd` is memory of another process; None: allocates."""
        layout: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "masks": ((slots, words + -words % ALIGNED_WORDS), np.int32),
            "ready": ((slots,), np.int64),
            "taken": ((slots,), np.int64),
            "failed": ((slots,), np.int64),
            "forced_counts": ((slots,), np.int32),
            "forced": ((slots, MAX_FORCED), np.int32),
            "message_sizes": ((slots,), np.int32),
            "messages": ((slots, MESSAGE_BYTES), np.uint8),
            "tokens": ((TOKEN_STEPS * slots, 3), np.int32),
            "written": ((1,), np.int64),
            "read": ((MAX_PROCESSES,), np.int64),
        }
        # Each array begins at a page: none shares a cache line with another.
        sizes = [_pages(prod(shape), kind) for shape, kind in layout.values()]
        begins = [0, *accumulate(sizes)]
        if fd is None:
            fd = os.memfd_create("pagewire-masks")
            os.ftruncate(fd, begins[-1])
        self.fd = fd
        self.slots, self.words = slots, words
        memory, arrays = mmap.mmap(fd, begins[-1]), {}
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)  # all of it
        for (name, (shape, kind)), begin in zip(layout.items(), begins[:-1], strict=True):
            arrays[name] = np.frombuffer(memory, kind, prod(shape), begin).reshape(shape)
        # The masks, and the stamp of the token that each is for. A device copies `padded_masks`.
        self.padded_masks: NDArray[np.int32] = arrays["masks"]  # [slots, words or a little more]
        self.masks: NDArray[np.int32] = self.padded_masks[:, :words]  # [slots, words]
        self.ready: NDArray[np.int64] = arrays["ready"]  # [slots]
        # The text that must come next, as tokens, and the stamp of the first token.
        self.forced: NDArray[np.int32] = arrays["forced"]  # [slots, MAX_FORCED]
        self.forced_counts: NDArray[np.int32] = arrays["forced_counts"]  # [slots]
        self.taken: NDArray[np.int64] = arrays["taken"]  # [slots]
        # The generation of the last sequence that failed, and why.
        self.failed: NDArray[np.int64] = arrays["failed"]  # [slots]
        self._message_sizes: NDArray[np.int32] = arrays["message_sizes"]  # [slots]
        self._messages: NDArray[np.uint8] = arrays["messages"]  # [slots, MESSAGE_BYTES]
        # The worker writes tokens into a ring, each with its slot and the generation of its
        # sequence, then their total number. `read` is the number that each process has read.
        self.tokens: NDArray[np.int32] = arrays["tokens"]  # [places, 3]
        self.written: NDArray[np.int64] = arrays["written"]  # [1]
        self.read: NDArray[np.int64] = arrays["read"]  # [MAX_PROCESSES]

    def put_tokens(self, begin: int, rows: NDArray[np.int32]) -> None:
        """Writes `rows [n, 3]` into the ring; `begin` is the number of rows before them."""
        at = begin % len(self.tokens)
        head = self.tokens[at : at + len(rows)]
        head[:] = rows[: len(head)]
        self.tokens[: len(rows) - len(head)] = rows[len(head) :]

    def get_tokens(self, begin: int, end: int) -> NDArray[np.int32]:
        """Rows `begin` to `end` of the ring, `[end - begin, 3]`, until they are overwritten."""
        at = begin % len(self.tokens)
        head = self.tokens[at : at + end - begin]
        rest = end - begin - len(head)
        return np.concatenate((head, self.tokens[:rest])) if rest else head

    def note_failure(self, slot: int, generation: int, message: str, field: str) -> None:
        """Writes why a sequence failed; a long message is cut."""
        text = f"{field}\0{message}".encode()[:MESSAGE_BYTES]
        self._messages[slot, : len(text)] = np.frombuffer(text, np.uint8)
        self._message_sizes[slot] = len(text)
        self.failed[slot] = generation

    def failure(self, slot: int) -> tuple[str, str]:
        """The message and the field of a slot's last failure."""
        text = self._messages[slot, : self._message_sizes[slot]].tobytes()
        field, _, message = text.decode(errors="ignore").partition("\0")
        return message, field


def _pages(count: int, kind: type[np.generic]) -> int:
    """The bytes of the pages that hold `count` elements."""
    return -(-count * np.dtype(kind).itemsize // _PAGE) * _PAGE
