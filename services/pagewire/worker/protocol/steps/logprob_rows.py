"""Log probabilities of sampled tokens: their rows in a step, and the fields of the answer."""

from dataclasses import dataclass

import numpy as np

from pagewire.packing import Float32Array, Int32Array, pack, pack_floats


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The sampling rows of a step that need log probabilities, at least one."""

    rows: Int32Array  # [n], ascending
    num_top: int  # likeliest tokens, the maximum over the rows


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of sampling rows. Those of failed rows have no meaning."""

    rows: Int32Array  # [n], ascending
    chosen: Float32Array  # [n], of each row's token
    top_ids: Int32Array  # [n, num_top], most likely first
    top: Float32Array  # [n, num_top]

    def fields(self, tokens: Int32Array, answered: Int32Array | None) -> dict[str, bytes]:
        """The fields of a StepResult; failed rows are left out.

        Args:
            tokens: `[sampling rows]`, -1 for a failed row.
            answered: the sampling row of each row of the answer, see `PlannedStep.rows`.
        """
        sound = tokens[self.rows] >= 0
        rows = self.rows[sound]
        if answered is not None:
            rows = np.flatnonzero(answered >= 0).astype(np.int32)[rows]
        return {
            "logprob_rows": pack(rows),
            "logprobs": pack_floats(self.chosen[sound]),
            "top_ids": pack(self.top_ids[sound]),
            "top_logprobs": pack_floats(self.top[sound]),
        }
