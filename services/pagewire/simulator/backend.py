"""A simulated device: tokens are a hash of the history, and steps take the time of `StepTime`.

The KV of a position is a hash of all tokens up to it, kept in the block that the block table names.
So wrong blocks, a wrong prefix or a wrong history change the tokens, as on a real device. A token
is a pure function of

- the sequence's tokens before it, independent of the prompt's end, preemptions and cached blocks
  (with a window, it also reads the first KV in the window, which must still exist),
- with a temperature above 0 also its seed and the token's index in the request,
- and, for indices below `min_tokens`, the stop ids that must not be drawn.

Other sampling parameters have no effect. The drawn token always has probability 1/2, and the ids
after it have 1/4, 1/8 and so on. At the place of a prompt token, the token of greedy choice has
probability 1/2.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import MAX_STOP_IDS
from pagewire.packing import Int32Array
from pagewire.simulator.step_time import StepTime, Work
from pagewire.v1 import worker_pb2 as worker_pb
from pagewire.worker.protocol.backend import HostCosts, Outcome
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import Chunks, DevicePlan, SlotStarts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows, Logprobs
from pagewire.worker.protocol.steps.prompt_rows import PromptLogprobs, PromptRows
from pagewire.worker.protocol.steps.step import StepHostCopies

Hashes = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Running:
    """A submitted step: its answer, and the time when the answer is due."""

    tokens: Int32Array  # [rows]
    logprobs: Logprobs | None
    prompt_logprobs: PromptLogprobs | None
    seconds: float
    done_at: float  # by the backend's clock


class SimulatedBackend:
    """A `Backend` whose steps run one after another, as on a GPU; `wait` sleeps until one is done.

    The methods of `Backend` are documented there.
    """

    synchronous = False
    pooling: worker_pb.Pooling | None = None
    prefix_groups = False  # the time model reads all KV of each row
    row_costs: RowCosts | None = None
    piggyback_tokens = 0  # by the time model, a prompt token costs the same in any step
    mask_memory = None

    def __init__(
        self,
        limits: Limits,
        step_time: StepTime,
        speedup: float,
        weight_bytes: int = 0,
        kv_cache_bytes: int = 0,
        host_costs: HostCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Steps take the time of `step_time` divided by `speedup`, or none if `speedup` is 0.

        `host_costs` are needed with blocks in host memory.
        """
        self.weight_bytes = weight_bytes
        self.kv_cache_bytes = kv_cache_bytes
        self.host_costs = host_costs
        self._limits = limits
        self._step_time = step_time
        self._speedup = speedup
        self._clock, self._sleep = clock, sleep
        self._busy_until = 0.0
        slots = limits.num_slots
        self._kv: Hashes = np.zeros((limits.num_blocks, limits.block_size), np.uint64)
        self._host: Hashes = np.zeros((limits.host_blocks, limits.block_size), np.uint64)
        self._tables = np.zeros((slots, limits.max_blocks), np.int32)
        self._last = np.zeros(slots, np.int32)
        self._seed: Hashes = np.zeros(slots, np.uint64)
        self._seeded = np.zeros(slots, np.bool_)
        self._min_tokens = np.zeros(slots, np.int32)
        self._stops = np.full((slots, MAX_STOP_IDS), -1, np.int32)

    def warm_up(self) -> None:
        """Does nothing."""

    def copy(self, copies: StepHostCopies) -> None:
        """Copies hashes, and takes the time of `host_costs`."""
        assert self.host_costs is not None
        self._host[copies.saved_host] = self._kv[copies.saved]
        self._kv[copies.loaded] = self._host[copies.loaded_host]
        saved, loaded = len(copies.saved), len(copies.loaded)
        self._take(saved * self.host_costs.save_block + loaded * self.host_costs.load_block)

    def submit(self, plan: DevicePlan) -> Running:
        """Computes the answer at once; it is due when the device has finished all steps so far."""
        if plan.starts is not None:
            self._start(plan.starts)
        if plan.writes is not None:
            self._tables[plan.writes.slots, plan.writes.columns] = plan.writes.blocks
        if plan.copies is not None:
            self._kv[plan.copies.targets] = self._kv[plan.copies.sources]
        histories = self._decode(plan.decode_slots, plan.decode_positions)
        histories = self._windowed(plan.decode_slots, plan.decode_positions, histories)
        prompt_logprobs = None
        if plan.chunks is not None:
            hashes = self._prefill(plan.chunks)
            last = plan.chunks.starts[1:] - 1
            ends = self._windowed(plan.chunks.slots, plan.chunks.positions[last], hashes[last])
            ends = ends[plan.chunks.samples]
            histories = np.concatenate((histories, ends))
            if plan.prompt_rows is not None:
                prompt_logprobs = self._prompt_logprobs(hashes, plan.prompt_rows)
        tokens = self._draw(plan.sample_slots, plan.sample_indices, histories)
        self._last[plan.sample_slots] = tokens
        seconds = self._take(self._step_time.seconds(work_of(plan)))
        logprobs = None if plan.logprobs is None else self._logprobs(tokens, plan.logprobs)
        return Running(tokens, logprobs, prompt_logprobs, seconds, self._busy_until)

    def wait(self, handle: Running) -> Outcome:
        """Sleeps until the answer is due."""
        left = handle.done_at - self._clock()
        if left > 0:
            self._sleep(left)
        duration_us = round(handle.seconds * 1e6)
        return Outcome(handle.tokens, (), duration_us, handle.logprobs, handle.prompt_logprobs)

    def scrub(self, blocks: Int32Array) -> None:
        """Does nothing: no row fails, and all KV is finite."""

    def is_fatal(self, error: BaseException) -> bool:
        """Never: there is no device to lose."""
        return False

    def _take(self, seconds: float) -> float:
        """Keeps the device busy for `seconds` of a real one; returns the simulated seconds."""
        taken = seconds / self._speedup if self._speedup else 0.0
        self._busy_until = max(self._clock(), self._busy_until) + taken
        return taken

    def _start(self, starts: SlotStarts) -> None:
        slots = starts.slots
        self._seed[slots] = starts.seed.view(np.uint64)
        self._seeded[slots] = starts.numbers["temperature"] > 0
        self._min_tokens[slots] = starts.min_tokens
        self._stops[slots] = starts.stop_token_ids

    def _decode(self, slots: Int32Array, positions: Int32Array) -> Hashes:
        """Writes the KV of each row's last token; returns the hashes of the histories `[rows]`."""
        before = self._read(slots, positions - 1)
        return self._write(slots, positions, before + _term(self._last[slots], positions))

    def _prefill(self, chunks: Chunks) -> Hashes:
        """Writes the KV of the chunks; returns the hash of each token's history, `[prefilled]`."""
        counts = np.diff(chunks.starts)
        first = chunks.positions[chunks.starts[:-1]]
        before = np.where(first > 0, self._read(chunks.slots, first - 1), np.uint64(0))
        sums = np.cumsum(_term(chunks.tokens, chunks.positions), dtype=np.uint64)
        earlier = np.concatenate((np.zeros(1, np.uint64), sums))[chunks.starts[:-1]]
        hashes = sums + np.repeat(before - earlier, counts)
        return self._write(np.repeat(chunks.slots, counts), chunks.positions, hashes)

    def _windowed(self, slots: Int32Array, positions: Int32Array, histories: Hashes) -> Hashes:
        """Hashes that also depend on the KV of the first position that each row sees.

        Without a window, sequences keep all their KV, and the hashes stay unchanged.
        """
        if not self._limits.window:
            return histories
        first = np.maximum(positions - np.int32(self._limits.window - 1), 0)
        return histories ^ _mixed(self._read(slots, first))

    def _read(self, slots: Int32Array, positions: Int32Array) -> Hashes:
        return self._kv[self._blocks(slots, positions), positions % self._limits.block_size]

    def _write(self, slots: Int32Array, positions: Int32Array, hashes: Hashes) -> Hashes:
        self._kv[self._blocks(slots, positions), positions % self._limits.block_size] = hashes
        return hashes

    def _blocks(self, slots: Int32Array, positions: Int32Array) -> Int32Array:
        return self._tables[slots, positions // self._limits.block_size]

    def _draw(self, slots: Int32Array, indices: Int32Array, histories: Hashes) -> Int32Array:
        noise = _mixed(self._seed[slots] + indices.astype(np.uint64) * _GOLDEN)
        drawn = _mixed(np.where(self._seeded[slots], histories ^ noise, histories))
        tokens = (drawn % np.uint64(self._limits.vocab_size)).astype(np.int32)
        early = np.flatnonzero(indices < self._min_tokens[slots])
        while len(early):
            early = early[(self._stops[slots[early]] == tokens[early, None]).any(axis=1)]
            tokens[early] = (tokens[early] + 1) % self._limits.vocab_size
        return tokens

    def _logprobs(self, tokens: Int32Array, wanted: LogprobRows) -> Logprobs:
        places = np.arange(wanted.num_top, dtype=np.int32)
        halvings = -np.log(2.0) * (places + 1)
        chosen = tokens[wanted.rows]
        return Logprobs(
            rows=wanted.rows,
            chosen=np.full(len(chosen), -np.log(2.0), np.float32),
            top_ids=(chosen[:, None] + places) % np.int32(self._limits.vocab_size),
            top=np.tile(halvings.astype(np.float32), (len(chosen), 1)),
        )

    def _prompt_logprobs(self, hashes: Hashes, rows: PromptRows) -> PromptLogprobs:
        vocab = self._limits.vocab_size
        greedy = (_mixed(hashes[rows.rows]) % np.uint64(vocab)).astype(np.int32)
        ranks = (rows.targets - greedy) % np.int32(vocab) + np.int32(1)
        places = np.arange(rows.num_top, dtype=np.int32)
        halvings = (-np.log(2.0) * (places + 1)).astype(np.float32)
        return PromptLogprobs(
            rows=rows,
            chosen=(-np.log(2.0) * ranks).astype(np.float32),
            ranks=ranks,
            top_ids=(greedy[:, None] + places) % np.int32(vocab),
            top=np.tile(halvings, (len(greedy), 1)),
        )


def work_of(plan: DevicePlan) -> Work:
    """The work of a step."""
    chunks = plan.chunks
    return Work(
        steps=1,
        rows=plan.num_decodes,
        kv_tokens=int(plan.decode_positions.sum()) + plan.num_decodes,
        prefill_tokens=plan.num_prefilled,
        prefill_pairs=0 if chunks is None else int(chunks.positions.sum()) + plan.num_prefilled,
    )


def _term(tokens: Int32Array, positions: Int32Array) -> Hashes:
    """The terms that tokens at these positions add to the hash of a history."""
    return _mixed(tokens.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64))


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64, for each value."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
