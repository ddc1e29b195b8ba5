"""Long prompts beside running decodes, on a simulated worker with its own clock."""

from collections.abc import Callable

import numpy as np

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.chunk_size import MIN_TOKENS, ChunkSize
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.sequence import Sequence, State
from support.sequences import GREEDY, admit

BUDGET = 8192

Timing = Callable[[int, int], int]


def linear(decodes: int, prefilled: int) -> int:
    """Microseconds of a step: 8 ms of weights, 20 us a decode, 25 us a prompt token."""
    return 8000 + 20 * decodes + 25 * prefilled


def curved(decodes: int, prefilled: int) -> int:
    """The cost of a token grows with the chunk, as in attention."""
    return 8000 + 20 * decodes + 25 * prefilled + prefilled**2 // 200


class Simulation:
    """One worker, run step by step; notes the durations of steps with decodes."""

    def __init__(self, timing: Timing, slo_us: int | None) -> None:
        limits = WorkerLimits(20_000, 16, 256, BUDGET, 1.0, prefix_caching=False)
        self.batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
        self.control = None if slo_us is None else ChunkSize(slo_us)
        self.timing = timing
        self.now = self.arrivals = 0
        self.with_decodes: list[int] = []

    def arrive(self, prompt: int, max_tokens: int) -> Sequence:
        tokens = np.full(prompt, 3, np.int32)
        sequence = Sequence(tokens, GREEDY, max_tokens, (), self.arrivals)
        self.arrivals += 1
        admit(self.batch, sequence)
        return sequence

    def step(self) -> bool:
        if self.control is not None:
            self.batch.chunk_tokens = self.control.tokens
        plan = self.batch.plan()
        if plan is None:
            return False
        decodes, prefilled = len(plan.decode_slots), sum(plan.prefill_counts)
        duration = self.timing(decodes, prefilled)
        self.now += duration
        if decodes:
            self.with_decodes.append(duration)
            if self.control is not None:
                self.control.observe(prefilled, duration)
        outcome = self.batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        for slot in outcome.slots[outcome.ended].tolist():
            self.batch.finish(slot, State.COMPLETED)
        return True


def long_prompts(timing: Timing, slo_us: int | None) -> Simulation:
    """32 sequences decode; five prompts of 20,000 tokens arrive meanwhile."""
    simulation = Simulation(timing, slo_us)
    for _ in range(32):
        simulation.arrive(50, 400)
    for _ in range(20):
        simulation.step()
    simulation.with_decodes.clear()
    for _ in range(5):
        simulation.arrive(20_000, 4)
    while any(s.state is State.PREFILL for s in simulation.batch.running()):
        simulation.step()
    return simulation


def test_long_prompts_stall_decodes_without_a_target() -> None:
    assert max(long_prompts(linear, None).with_decodes) > 200_000


def test_a_target_keeps_steps_within_it() -> None:
    for timing in (linear, curved):
        durations = long_prompts(timing, 30_000).with_decodes
        late = sorted(durations)[int(0.99 * len(durations))]
        assert late < 33_000, timing.__name__
        assert max(durations) < 60_000, timing.__name__


def test_the_target_is_used_up() -> None:
    """Chunks are as large as the target allows; smaller ones would delay prompts without a gain."""
    durations = long_prompts(linear, 30_000).with_decodes
    assert sorted(durations)[len(durations) // 2] > 27_000


def test_it_follows_a_worker_that_slows_down() -> None:
    control = ChunkSize(30_000)
    for cost in (25, 100, 10):
        for _ in range(60):
            tokens = control.tokens
            control.observe(tokens, 8000 + cost * tokens)
        assert 0.85 * 22_000 / cost < control.tokens < 1.1 * 22_000 / cost, cost


def test_prefill_never_stops_where_decodes_alone_miss_the_target() -> None:
    control = ChunkSize(5_000)
    for _ in range(30):
        control.observe(0, 9000)
        control.observe(control.tokens, 9000 + 25 * control.tokens)
    assert control.tokens == MIN_TOKENS


def test_nothing_changes_without_decodes_or_without_a_target() -> None:
    without = Simulation(linear, None)
    within = Simulation(linear, 30_000)
    for simulation in (without, within):
        simulation.arrive(20_000, 1)
        while simulation.step():
            pass
    assert within.now == without.now
    assert without.batch.chunk_tokens >= BUDGET
