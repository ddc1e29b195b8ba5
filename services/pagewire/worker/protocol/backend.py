"""The interface between the step executor and a device."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Float32Array, Int32Array
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import Logprobs
from pagewire.worker.protocol.steps.prompt_rows import PromptLogprobs
from pagewire.worker.protocol.steps.step import StepHostCopies


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A sampling row without a token, and the reason as a message for users."""

    row: int
    message: str
    retryable: bool
    field: str = ""  # of the request, if the backend does not support its value


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Costs in seconds; `WorkerInfo` in worker.proto defines each."""

    save_block: float
    load_block: float
    prefill_token: float
    prefill_pair: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    tokens: Int32Array  # [rows], -1 for each row in `failures`
    failures: tuple[RowFailure, ...]  # in the order of the rows
    duration_us: int
    logprobs: Logprobs | None = None  # of the rows in `DevicePlan.logprobs`
    prompt_logprobs: PromptLogprobs | None = None  # of `DevicePlan.prompt_rows`
    pooled: Float32Array | None = None  # [rows, size], the vectors of a backend that pools
    # [rows], of a plan with drafts: the rows whose inputs are the tokens of the output. The tokens
    # of the other rows have no meaning. The backend has passed the tokens to the plan's masks.
    taken: NDArray[np.bool_] | None = None
    # [sequences that sample], the drafts of each, of a device that may have had fewer than planned,
    # and the Drafter (worker.proto) that made them.
    drafted: Int32Array | None = None
    drafters: Int32Array | None = None
    # From a device that drafts, for each sampling sequence: whether its first draft, computed or
    # not, was its next token.
    right: NDArray[np.bool_] | None = None


class Backend(Protocol):
    """The device side of all slots: block tables, KV cache, sampling state, last tokens.

    One thread calls `warm_up`, `copy`, `submit` and `scrub`, in the order of the steps. `wait` is
    called once for each handle, in the same order. If `synchronous` is true, the same thread calls
    it. Otherwise another thread does, while later steps are submitted.

    An exception from `submit` or `wait` fails that step alone, unless `is_fatal` is true for it.
    """

    synchronous: bool
    prefix_groups: bool  # whether it uses `DevicePlan.groups`
    weight_bytes: int
    kv_cache_bytes: int
    host_costs: HostCosts | None  # measured by `warm_up`; None without host blocks
    piggyback_tokens: int  # measured by `warm_up`; see WorkerInfo in worker.proto
    pooling: pb.Pooling | None  # None: it generates
    row_costs: RowCosts | None  # measured by `warm_up`; None: it makes no drafts itself

    @property
    def mask_memory(self) -> MaskMemory | None:
        """Memory for the masks of all slots; None if none are applied."""

    def warm_up(self) -> None:
        """Compiles, captures, allocates and measures, so that the first requests do not wait."""

    def copy(self, copies: StepHostCopies) -> None:
        """Copies blocks between device and host: after all steps so far, before the next one.

        An exception is fatal, because the content of the blocks is then unknown.
        """

    def submit(self, plan: DevicePlan) -> Any:
        """Starts a step and returns its handle; waits for it only if `synchronous`.

        A row that fails must leave a valid token id as the last token of its slot, because steps
        submitted before the failure is known may decode that slot again.
        """

    def wait(self, handle: Any) -> Outcome:
        """Waits until the step of a handle is done, and returns its result."""

    def scrub(self, blocks: Int32Array) -> None:
        """Makes every value in the KV of `blocks [n]` finite, after all steps submitted so far.

        It is called for the blocks of a failed sequence before another sequence gets them. The
        attention mask does not stop a NaN after the end of a sequence.
        """

    def is_fatal(self, error: BaseException) -> bool:
        """Whether this process cannot use the device any more after `error`."""


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A backend with its memory, and the limits of the steps that it accepts."""

    backend: Backend
    limits: Limits
    dtype: str
    device: str
    uses_triton: bool
    batch_invariant: bool = False
    fp8_kv: bool = False


def non_finite(index: int) -> str:
    """The message for a row whose logits are not finite; `index` counts generated tokens."""
    return (
        f"the model's logits for token {index} are not finite (NaN or infinity), so there is no "
        "token to sample; a wider --dtype may help"
    )
