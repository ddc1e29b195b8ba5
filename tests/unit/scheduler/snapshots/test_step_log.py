"""Steps are recorded only while clients request snapshots."""

from types import SimpleNamespace
from typing import Any

from pagewire.scheduler.snapshots.step_log import MAX_STEPS, StepLog

BATCH: Any = object()


def plan(decodes: int = 2, prefills: tuple[int, ...] = (5, 6)) -> Any:
    copies = SimpleNamespace(saved=[1], loaded=[2, 3])
    return SimpleNamespace(decode_slots=[0] * decodes, prefill_counts=prefills, copies=copies)


def test_nothing_is_kept_while_nobody_asks() -> None:
    now = [10.0]
    log = StepLog(lambda: now[0])
    log.note(BATCH, plan(), 100)
    assert list(log.after(0)) == []
    log.note(BATCH, plan(), 200)
    [step] = log.after(0)
    assert (step.duration_us, step.decodes, step.prefills, step.copies) == (200, 2, 11, 3)
    now[0] += 6.0  # no request during this time
    log.note(BATCH, plan(), 300)
    log.note(BATCH, plan(), 400)
    assert list(log.after(0)) == []


def test_each_asks_for_what_it_has_not_seen() -> None:
    log = StepLog(lambda: 0.0)
    list(log.after(0))
    for duration in range(1, 6):
        log.note(BATCH, plan(), duration)
    assert [step.duration_us for step in log.after(3)] == [4, 5]
    assert [step.duration_us for step in log.after(0)] == [1, 2, 3, 4, 5]
    assert list(log.after(log.last)) == []


def test_it_keeps_so_many_steps() -> None:
    log = StepLog(lambda: 0.0)
    list(log.after(0))
    for duration in range(MAX_STEPS + 10):
        log.note(BATCH, plan(), duration)
    assert len(list(log.after(0))) == MAX_STEPS
