"""Replays a trace through the scheduling core, with a clock that jumps from event to event.

Queue, policy, routing, batching, blocks and prefix cache are the production code. Only the time of
steps is simulated. Events are arrivals and ends of steps.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.step_plan import StepOutcome, StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.routing import Router
from pagewire.scheduler.core.sequence import Sampling, Sequence, State
from pagewire.simulator.recording import Recording, RequestRecord, Sample
from pagewire.simulator.step_time import StepTime, Work
from pagewire.simulator.trace import TraceRequest

_GREEDY = Sampling(temperature=0.0, seed=0, min_tokens=0)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker's batch, and the requests in its slots."""

    batch: WorkerBatch
    tokens: Int32Array  # [slots], the token that the slot's request draws in every step
    numbers: Int32Array  # [slots], the request's number in the trace
    busy_until: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class Replay:
    """One replay. Call `run` once; or call `start`, then `turn` for each event, then `end`."""

    policy: SchedulingPolicy
    router: Router
    limits: WorkerLimits
    num_workers: int
    step_time: StepTime
    run_ahead: int = 2
    # Seconds between samples of the state.
    interval: float = 1.0
    on_progress: Callable[[float], None] = lambda seconds: None
    _admission: Admission = field(init=False)
    _workers: dict[WorkerBatch, _Worker] = field(init=False, default_factory=dict)
    # Steps in flight by their end, with their seconds. The number orders steps that end together.
    _ends: list[tuple[float, int, WorkerBatch, float]] = field(init=False, default_factory=list)
    _recording: Recording = field(init=False)
    _output_tokens: int = field(init=False, default=0)
    _latest_token: NDArray[np.float64] = field(init=False)  # [requests], by their numbers
    # Requests that have not ended.
    num_open: int = field(init=False, default=0)

    def run(self, requests: Iterable[TraceRequest]) -> Recording:
        """Replays requests, in order of arrival, until the last has ended."""
        arrivals = deque(requests)
        self.start(max((r.number for r in arrivals), default=0))
        now = 0.0
        while arrivals or self._ends:
            now = min(arrivals[0].arrival if arrivals else math.inf, self.next_end)
            arriving = []
            while arrivals and arrivals[0].arrival <= now:
                arriving.append(arrivals.popleft())
            self.turn(now, arriving)
        return self.end(now)

    @property
    def next_end(self) -> float:
        """When the next step ends; infinity if none is in flight."""
        return self._ends[0][0] if self._ends else math.inf

    def turn(self, now: float, arriving: Iterable[TraceRequest]) -> None:
        """Processes arriving requests and the steps that have ended, then admits and plans."""
        self._sample_until(now)
        for request in arriving:
            self._arrive(request)
        while self.next_end <= now:
            _, _, batch, seconds = heapq.heappop(self._ends)
            self._commit(batch, seconds, now)
        self._pump(now)

    def end(self, now: float) -> Recording:
        """Returns the record; call it when no request runs."""
        assert not len(self._admission.waiting), "a request waits and nothing runs"
        self._sample_until(now)
        recording = self._recording
        recording.preemptions = self._admission.preemptions
        recording.busy_seconds = sum(worker.busy_seconds for worker in self._workers.values())
        recording.seconds = now
        return recording

    def start(self, last_number: int) -> None:
        """Begins a replay of requests with numbers up to this one."""
        self._latest_token = np.zeros(1 + last_number)
        self._admission = Admission(self.policy, self.router)
        for _ in range(self.num_workers):
            batch = self._admission.add_worker(self.limits)
            slots = np.zeros(self.limits.num_slots, np.int32)
            self._workers[batch] = _Worker(batch, slots, slots.copy())
        total_blocks = self.num_workers * (self.limits.num_blocks - 1)
        self._recording = Recording(self.num_workers, total_blocks, self.limits.block_size)

    def _arrive(self, request: TraceRequest) -> None:
        hash_blocks = len(request.hash_ids) if request.hash_ids is not None else 0
        record = RequestRecord(
            request.arrival, request.input_length, request.output_length, hash_blocks
        )
        self._recording.requests.append(record)
        self.num_open += 1
        sequence = Sequence(
            prompt=request.prompt(),
            sampling=_GREEDY,
            max_tokens=request.output_length,
            stop_ids=(),
            arrival=request.number,
            owner=record,
        )
        self._admission.waiting.push(sequence)

    def _pump(self, now: float) -> None:
        """Admits, then plans while steps are missing, as the engine does after every event."""
        progress = True
        while progress:
            self._admit(now)
            progress = False
            for worker in self._workers.values():
                if len(worker.batch.in_flight) < self.run_ahead:
                    plan = worker.batch.plan()
                    if plan is not None:
                        self._launch(worker, plan, now)
                        progress = True

    def _admit(self, now: float) -> None:
        for admitted in self._admission.admit():
            sequence, batch = admitted.sequence, admitted.batch
            if batch is None:
                self._recording.refused += 1
                self.num_open -= 1
                continue
            # Differs from the outputs of other requests, and is above all token ids of prompts.
            worker = self._workers[batch]
            worker.tokens[sequence.slot] = INT32_MAX - sequence.arrival
            worker.numbers[sequence.slot] = sequence.arrival
            if admitted.restart is not None:
                self._recording.restarts[admitted.restart] += 1
            record: RequestRecord = sequence.owner
            if record.admitted is None:
                record.admitted = now
                record.cached_tokens = sequence.num_computed
                record.loaded_tokens = sequence.num_loaded

    def _launch(self, worker: _Worker, plan: StepPlan, now: float) -> None:
        seconds = self.step_time.seconds(work_of(plan, worker.batch))
        if plan.copies is not None:
            saved, loaded = len(plan.copies.saved), len(plan.copies.loaded)
            host = self.limits.host
            seconds += saved * host.save_block + loaded * host.load_block
            self._recording.saved_blocks += saved
            self._recording.loaded_blocks += loaded
        worker.busy_until = max(now, worker.busy_until) + seconds
        worker.busy_seconds += seconds
        self._recording.steps += 1
        end = (worker.busy_until, self._recording.steps, worker.batch, seconds)
        heapq.heappush(self._ends, end)

    def _commit(self, batch: WorkerBatch, seconds: float, now: float) -> None:
        plan = batch.in_flight[0]
        tokens = self._workers[batch].tokens[plan.rows]
        outcome = batch.commit(plan.number, tokens, round(seconds * 1e6))
        self._output_tokens += len(outcome.slots)
        self._note_pauses(batch, outcome, now)
        self._note_first_tokens(batch, outcome, now)
        for row in outcome.ended:
            sequence = batch.finish(int(outcome.slots[row]), State.COMPLETED)
            sequence.owner.last_token = now
            self.num_open -= 1

    def _note_pauses(self, batch: WorkerBatch, outcome: StepOutcome, now: float) -> None:
        """Notes the time since the previous token of each request that gets one."""
        if not len(outcome.slots):
            return
        numbers = self._workers[batch].numbers[outcome.slots]
        later = outcome.indices > 0
        pauses = now - self._latest_token[numbers[later]]
        longest = float(pauses.max()) if len(pauses) else 0.0
        self._recording.longest_pause = max(self._recording.longest_pause, longest)
        self._latest_token[numbers] = now

    def _note_first_tokens(self, batch: WorkerBatch, outcome: StepOutcome, now: float) -> None:
        for slot in outcome.slots[outcome.indices == 0].tolist():
            sequence = batch.slots.sequences[slot]
            assert sequence is not None
            sequence.owner.first_token = now

    def _sample_until(self, now: float) -> None:
        """Samples the state at every interval since the last event, which was the last change."""
        samples = self._recording.samples
        while (time := len(samples) * self.interval) <= now:
            batches = [worker.batch for worker in self._workers.values()]
            samples.append(
                Sample(
                    time=time,
                    waiting=len(self._admission.waiting),
                    running=sum(batch.num_running for batch in batches),
                    used_blocks=sum(batch.pool.used for batch in batches),
                    wasted_tokens=sum(_wasted_tokens(batch) for batch in batches),
                    output_tokens=self._output_tokens,
                    busy_seconds=sum(
                        worker.busy_seconds - max(0.0, worker.busy_until - time)
                        for worker in self._workers.values()
                    ),
                )
            )
            self.on_progress(time)


def work_of(plan: StepPlan, batch: WorkerBatch) -> Work:
    """The work of a newly planned step."""
    computed = batch.slots.computed
    pairs = 0
    for slot, count in zip(plan.prefill_slots, plan.prefill_counts, strict=True):
        pairs += count * (2 * int(computed[slot]) - count + 1) // 2
    return Work(
        steps=1,
        rows=len(plan.decode_slots),
        kv_tokens=int(computed[plan.decode_slots].sum()),
        prefill_tokens=sum(plan.prefill_counts),
        prefill_pairs=pairs,
    )


def _wasted_tokens(batch: WorkerBatch) -> int:
    table = batch.slots
    wasted = 0
    for sequence in batch.running():
        held = len(sequence.prompt) + int(table.received[sequence.slot])
        wasted += max(0, int(table.capacity[sequence.slot]) - held)
    return wasted
