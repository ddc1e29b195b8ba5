"""A step as it arrives: the wire message decoded into numpy arrays."""

from dataclasses import dataclass, field

import numpy as np

from pagewire.errors import invalid
from pagewire.packing import Float32Array, Int32Array, unpack
from pagewire.sampling import SamplingNumbers, numbers_of
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.constraints.constraint import Constraint

_EMPTY = np.empty(0, np.int32)
_EMPTY.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling(SamplingNumbers):
    """Sampling parameters of a sequence, unchecked; `SlotSampling` in worker.proto defines them."""

    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    bias_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # ascending
    biases: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def penalized(self) -> bool:
        """Whether any of the three penalties is on."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence that starts in a slot; see `SequenceStart` in worker.proto."""

    slot: int
    token_ids: Int32Array  # [known]
    num_generated: int
    num_computed: int
    blocks: Int32Array  # [blocks]
    sampling: StepSampling
    copied_block: int = 0
    max_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    first_prompt_logprob: int = 1
    prediction: Int32Array = field(default_factory=lambda: _EMPTY)  # [predicted]
    cache_salt: str = ""
    # The worker sets this and the next field; they are not in the message.
    forced: Int32Array | None = None  # [output], see forced_texts.py
    recent: Int32Array = field(default_factory=lambda: _EMPTY)  # [recent], see slot_outputs.py

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) - self.num_generated


@dataclass(frozen=True, slots=True)
class StepPrefixGroup:
    """Decode slots whose first `blocks` blocks are the same."""

    blocks: int
    slots: Int32Array  # [members], ascending


@dataclass(frozen=True, slots=True)
class StepHostCopies:
    """Blocks copied to the host's memory, then blocks copied from there. Targets are distinct."""

    saved: Int32Array  # [saves], blocks of the device
    saved_host: Int32Array  # [saves], their targets on the host
    loaded_host: Int32Array  # [loads], blocks of the host
    loaded: Int32Array  # [loads], their targets on the device


@dataclass(frozen=True, slots=True)
class Step:
    """A decoded step; `Step` in worker.proto defines the fields."""

    number: int
    starts: tuple[Start, ...]
    append_slots: Int32Array  # [appends]
    append_blocks: Int32Array  # [appends]
    prefill_slots: Int32Array  # [chunks]
    prefill_counts: Int32Array  # [chunks]
    decode_slots: Int32Array | None  # [decodes]; None: as in the step before
    groups: tuple[StepPrefixGroup, ...] | None = None  # None: as in the step before
    host_copies: StepHostCopies | None = None
    freed_slots: Int32Array = field(default_factory=lambda: _EMPTY)  # [frees]
    freed_counts: Int32Array = field(default_factory=lambda: _EMPTY)  # [frees]


def decode_step(message: pb.Step) -> Step:
    """Decodes a message; RequestError INVALID_ARGUMENT if its arrays are malformed."""
    step = Step(
        number=message.step,
        starts=tuple(_start(start) for start in message.starts),
        append_slots=_array("append_slots", message.append_slots),
        append_blocks=_array("append_blocks", message.append_blocks),
        prefill_slots=_array("prefill_slots", message.prefill_slots),
        prefill_counts=_array("prefill_counts", message.prefill_counts),
        decode_slots=(
            _array("decode_slots", message.decode_slots)
            if message.HasField("decode_slots")
            else None
        ),
        groups=_groups(message),
        host_copies=_host_copies(message),
        freed_slots=_array("freed_slots", message.freed_slots),
        freed_counts=_array("freed_counts", message.freed_counts),
    )
    _same_length("append_blocks", step.append_blocks, "append_slots", step.append_slots)
    _same_length("freed_counts", step.freed_counts, "freed_slots", step.freed_slots)
    _same_length("prefill_counts", step.prefill_counts, "prefill_slots", step.prefill_slots)
    return step


def _groups(message: pb.Step) -> tuple[StepPrefixGroup, ...] | None:
    """The prefix groups of a step; RequestError if they are malformed."""
    if not (message.HasField("group_sizes") or message.group_blocks or message.group_slots):
        return None
    sizes = _array("group_sizes", message.group_sizes)
    blocks = _array("group_blocks", message.group_blocks)
    slots = _array("group_slots", message.group_slots)
    _same_length("group_blocks", blocks, "group_sizes", sizes)
    if len(sizes) and sizes.min() < 2:
        raise invalid("group_sizes", f"a group has {sizes.min()} members; it must have at least 2")
    if len(blocks) and blocks.min() < 1:
        raise invalid(
            "group_blocks", f"a group shares {blocks.min()} blocks; it must share at least 1"
        )
    ends = np.cumsum(sizes, dtype=np.int64)
    members = int(ends[-1]) if len(ends) else 0
    if members != len(slots):
        raise invalid(
            "group_slots", f"group_slots has {len(slots)} slots; group_sizes add up to {members}"
        )
    if not message.HasField("group_sizes"):
        return None
    each = np.split(slots, ends[:-1])
    for group in each[: len(sizes)]:
        if (np.diff(group) <= 0).any():
            raise invalid(
                "group_slots", f"a group has the slots {group.tolist()}; they must ascend"
            )
    return tuple(StepPrefixGroup(int(n), group) for n, group in zip(blocks, each, strict=False))


def _host_copies(message: pb.Step) -> StepHostCopies | None:
    """The copies between device and host; RequestError if parallel arrays differ in length."""
    if not (
        message.saved_blocks
        or message.saved_host_blocks
        or message.loaded_host_blocks
        or message.loaded_blocks
    ):
        return None
    copies = StepHostCopies(
        saved=_array("saved_blocks", message.saved_blocks).copy(),
        saved_host=_array("saved_host_blocks", message.saved_host_blocks).copy(),
        loaded_host=_array("loaded_host_blocks", message.loaded_host_blocks).copy(),
        loaded=_array("loaded_blocks", message.loaded_blocks).copy(),
    )
    _same_length("saved_host_blocks", copies.saved_host, "saved_blocks", copies.saved)
    _same_length("loaded_blocks", copies.loaded, "loaded_host_blocks", copies.loaded_host)
    return copies


def _start(message: pb.SequenceStart) -> Start:
    sampling = message.sampling
    numbers = numbers_of(sampling)
    numbers["repetition_penalty"] = sampling.repetition_penalty or 1.0
    return Start(
        slot=message.slot,
        token_ids=_array("starts.token_ids", message.token_ids),
        num_generated=message.num_generated,
        num_computed=message.num_computed,
        blocks=_array("starts.blocks", message.blocks),
        sampling=StepSampling(
            **numbers,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sampling.stop_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            bias_ids=_array("starts.sampling.bias_ids", sampling.bias_ids),
            biases=_array("starts.sampling.biases", sampling.biases).view(np.float32),
        ),
        copied_block=message.copied_block,
        max_new_tokens=message.max_new_tokens,
        end_token_ids=tuple(message.end_token_ids),
        constraint=(
            Constraint.from_proto(message.constraint) if message.HasField("constraint") else None
        ),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        first_prompt_logprob=message.first_prompt_logprob,
        prediction=_array("starts.prediction", message.prediction),
        cache_salt=message.cache_salt,
    )


def _array(field: str, data: bytes) -> Int32Array:
    if not data:  # most fields of most steps
        return _EMPTY
    try:
        return unpack(data)
    except ValueError as error:
        raise invalid(
            field, f"{field} has {len(data)} bytes; it must be a multiple of 4"
        ) from error


def _same_length(name: str, values: Int32Array, other: str, others: Int32Array) -> None:
    if len(values) != len(others):
        raise invalid(
            name,
            f"{name} has {len(values)} values and {other} {len(others)}; both have one length",
        )
