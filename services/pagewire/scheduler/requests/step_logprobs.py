"""Log probabilities: from a worker's result to the clients that want them."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Float32Array, Int32Array, unpack, unpack_floats
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The candidates of some rows of a result: the sampled token, then the likeliest tokens."""

    rows: Int32Array  # [n], ascending positions in the result
    ids: Int32Array  # [n, 1 + top]
    values: Float32Array  # [n, 1 + top]

    @classmethod
    def read(cls, result: worker_pb.StepResult) -> "StepLogprobs":
        """The log probabilities of a result that has some; ValueError if they are invalid."""
        rows, tokens = unpack(result.logprob_rows), unpack(result.token_ids)
        if rows.min() < 0 or rows.max() >= len(tokens):
            raise ValueError(
                f"step {result.step} has log probabilities of rows {rows.min()} to {rows.max()}, "
                f"and {len(tokens)} rows"
            )
        ids = unpack(result.top_ids).reshape(len(rows), -1)
        values = unpack_floats(result.top_logprobs).reshape(ids.shape)
        chosen = unpack_floats(result.logprobs).reshape(len(rows), 1)
        return cls(rows, np.hstack((tokens[rows, None], ids)), np.hstack((chosen, values)))

    def of(self, valid: NDArray[np.bool_]) -> "StepLogprobs":
        """The log probabilities of the `valid` rows, with positions among these rows."""
        kept = valid[self.rows]
        rows = (np.cumsum(valid, dtype=np.int32) - 1)[self.rows[kept]]
        return StepLogprobs(rows, self.ids[kept], self.values[kept])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of one token, packed: the token itself, then the likeliest at its place."""

    count: int
    ids: bytes  # [count] int32
    logprobs: bytes  # [count] float32
    sizes: list[int]  # [count], bytes of each token in `data`
    data: bytes


@dataclass(slots=True, eq=False)
class CandidateBuffer:
    """The candidates that wait for one client; see MultiplexResponse."""

    _counts: list[int] = field(default_factory=list)
    _held: list[Candidates] = field(default_factory=list)

    def add(self, entry: int, candidates: Candidates) -> None:
        """Adds the candidates of the message's entry number `entry`; entries arrive in order."""
        self._counts += [0] * (entry - len(self._counts))
        self._counts.append(candidates.count)
        self._held.append(candidates)

    def move_to(self, message: pb.MultiplexResponse, entries: int) -> None:
        """Moves all candidates to a message of `entries` entries."""
        if not self._held:
            return
        missing = entries - len(self._counts)
        message.candidate_counts.extend(self._counts + [0] * missing)
        message.candidate_ids = b"".join([c.ids for c in self._held])
        message.candidate_logprobs = b"".join([c.logprobs for c in self._held])
        message.candidate_sizes.extend([size for c in self._held for size in c.sizes])
        message.candidate_bytes = b"".join([c.data for c in self._held])
        self._counts.clear()
        self._held.clear()
