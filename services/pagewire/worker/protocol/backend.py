"""What computes steps: the interface between the worker's engine and a device."""

from dataclasses import dataclass
from typing import Any, Protocol

from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.logprob_rows import Logprobs
from pagewire.worker.protocol.steps.step import StepHostCopies


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A sampling row that has no token, with the reason for people."""

    row: int
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the device, see WorkerInfo of worker.proto."""

    save_block: float
    load_block: float
    prefill_token: float
    prefill_pair: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step sampled: `tokens [rows]`, -1 for each row in `failures`, which are in order."""

    tokens: Int32Array
    failures: tuple[RowFailure, ...]
    duration_us: int
    logprobs: Logprobs | None = None  # of the rows that the plan names


class Backend(Protocol):
    """The device side of all slots: block tables, KV cache, sampling state, last tokens.

    `copy`, `submit`, `scrub` and `warm_up` are called from one thread, in the order of the steps.
    `wait` is called once for each handle, in the same order; from that thread as well if
    `synchronous` is true, otherwise from another one, while later steps are submitted.

    An exception from `submit` or `wait` fails that step alone, unless `is_fatal` says that the
    device is lost. Nothing here needs torch: a backend may be simulated.
    """

    synchronous: bool
    prefix_groups: bool  # whether it makes use of `DevicePlan.groups`
    weight_bytes: int
    kv_cache_bytes: int
    host_costs: HostCosts | None  # as `warm_up` has measured them; None without host blocks
    piggyback_tokens: int  # as `warm_up` has measured it, see WorkerInfo of worker.proto

    def warm_up(self) -> None:
        """Does once what serving must not wait for: compiling, capturing, first allocations."""

    def copy(self, copies: StepHostCopies) -> None:
        """Copies blocks between device and host, before the step submitted next and after all
        before it. An exception is fatal: nobody would know which blocks hold what."""

    def submit(self, plan: DevicePlan) -> Any:
        """Starts a step and returns its handle; does not wait unless `synchronous`.

        A row that failed must leave a valid token id as its slot's last token: steps submitted
        before the failure is known may decode it once more.
        """

    def wait(self, handle: Any) -> Outcome:
        """Waits until the step of a handle is done."""

    def scrub(self, blocks: Int32Array) -> None:
        """Makes every value in the KV of `blocks [n]` finite, after all steps submitted so far.

        Called for the blocks of a sequence that failed, which another sequence will take: a NaN
        left past that one's end would reach its attention through the mask.
        """

    def is_fatal(self, error: BaseException) -> bool:
        """Whether an error means that the device cannot be used by this process any more."""


def non_finite(index: int) -> str:
    """The message of a row whose logits are not finite."""
    return (
        f"the model's logits for token {index} are not finite (NaN or infinity), so there is no "
        "token to draw; a wider --dtype may help"
    )
