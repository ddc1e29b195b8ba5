"""The time of a step on a device: a linear model, fitted to measured steps."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

import numpy as np


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step, or of several steps together."""

    steps: float = 0  # each reads the weights once
    rows: float = 0  # decode rows
    kv_tokens: float = 0  # tokens that the decode rows attend to
    prefill_tokens: float = 0
    prefill_pairs: float = 0  # pairs of a prefilled token and a token that it attends to


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds for each unit of `Work`, in the order of its fields.

    Decode is bound by its reads (weights once a step, KV once a row), prefill by its computation.
    Kernels run one after another, so their times add up.
    """

    per_step: float
    per_row: float
    per_kv_token: float
    per_prefill_token: float
    per_prefill_pair: float

    def seconds(self, work: Work) -> float:
        """The time of some work."""
        return (
            self.per_step * work.steps
            + self.per_row * work.rows
            + self.per_kv_token * work.kv_tokens
            + self.per_prefill_token * work.prefill_tokens
            + self.per_prefill_pair * work.prefill_pairs
        )


def fit(measured: Iterable[tuple[Work, float]]) -> StepTime:
    """The model with the least squared relative errors.

    The model is linear in `Work`, so a whole run or one kernel alone is a valid measurement too.
    Raises ValueError if the measurements do not determine a model.
    """
    works, seconds = zip(*measured, strict=True)
    rows = np.array([astuple(work) for work in works]) / np.array(seconds)[:, None]
    # Scale the columns: counts of tokens and of steps differ by orders of magnitude.
    scale = np.abs(rows).max(axis=0)
    if not scale.all():
        missing = [f.name for f, s in zip(fields(Work), scale, strict=True) if not s]
        raise ValueError(f"no measurement has any {', '.join(missing)}; add one that has")
    costs, _, rank, _ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
    costs = costs / scale
    if rank < len(scale) or (costs < 0).any():
        raise ValueError(
            f"the measurements give the costs {costs.tolist()}, which must all be positive; add "
            "measurements that tell them apart"
        )
    return StepTime(*costs.tolist())
