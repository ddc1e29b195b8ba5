"""Prompt tokens of each step, alone and beside decodes."""

import numpy as np

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.prefill_queue import MAX_PIGGYBACKED_STEPS, MAX_START_TOKENS
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from support.sequences import admit, answer, counted, new_batch, sequence


def test_chunks_keep_to_the_budget_beside_decodes() -> None:
    batch = new_batch(num_blocks=30, budget=8)
    admit(batch, sequence(3, 10))
    batch.plan()
    admit(batch, counted(20, 10, 1))
    chunks = []
    while not chunks or sum(chunks) < 20:
        plan = batch.plan()
        assert plan.decode_slots.tolist() == [0]
        assert plan.num_tokens <= 8
        chunks += plan.prefill_counts
    assert chunks == [7, 7, 6]


def chunks_beside(num_decodes: int, *prompts: int) -> list[int]:
    """Prompt tokens of each step in which prompts are computed beside decodes, with
    `piggyback_tokens` of 16."""
    limits = WorkerLimits(800, 16, 16, 2000, 1.0, prefix_caching=False, piggyback_tokens=16)
    batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    for arrival in range(num_decodes):
        admit(batch, counted(4, 500, arrival))
    if num_decodes:
        answer(batch, batch.plan())
    for arrival, prompt in enumerate(prompts, num_decodes):
        admit(batch, counted(prompt, 100, arrival))
    chunks = []
    while sum(chunks) < sum(prompts):
        plan = batch.plan()
        chunks.append(sum(plan.prefill_counts))
        answer(batch, plan)
        batch.check()
    return chunks


def test_prompts_are_piggybacked_on_few_decodes() -> None:
    assert chunks_beside(4, 30) == [12, 12, 6]
    assert chunks_beside(8, 20) == [8, 8, 4]


def test_a_prompt_that_begins_to_decode_leaves_less_room_for_the_next() -> None:
    assert chunks_beside(4, 12, 22) == [12, 11, 11]


def test_a_prompt_is_piggybacked_for_a_limited_number_of_steps() -> None:
    steps = MAX_PIGGYBACKED_STEPS
    assert chunks_beside(4, 1000) == [1000 - steps * 12] + [12] * steps


def test_prompts_get_a_normal_prefill_beside_many_decodes_or_none() -> None:
    assert chunks_beside(9, 1000) == [1000]
    assert chunks_beside(0, 1000) == [1000]


def test_prompts_get_a_normal_prefill_while_the_backlog_exceeds_a_step() -> None:
    assert chunks_beside(4, 1999, 10) == [1996, 12, 1]


def test_a_step_starts_only_as_many_sequences_as_a_message_has_room_for() -> None:
    batch = new_batch(num_blocks=40, num_slots=8)
    for arrival in range(5):
        running = sequence(3, 10, arrival)
        running.prediction = np.zeros(MAX_START_TOKENS * 2 // 5, np.int32)
        admit(batch, running)
    large = sequence(3, 10, 5)
    large.prediction = np.zeros(2 * MAX_START_TOKENS, np.int32)  # too large beside any other
    admit(batch, large)
    started = []
    for _ in range(4):
        plan = batch.plan()
        started.append([each.arrival for each in plan.starts])
        assert len(plan.prefill_slots) == len(plan.starts)
        answer(batch, plan)
        batch.check()
    assert started == [[0, 1], [2, 3], [4], [5]]
