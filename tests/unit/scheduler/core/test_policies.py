"""The order of each policy, and policies that others install."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.longest_prefix import MAX_OVERTAKEN
from pagewire.scheduler.core.routing import LeastLoaded
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.policies import make_policy
from support.sequences import GREEDY


class Played:
    """One worker with `num_slots` slots, run step by step under a policy."""

    def __init__(self, policy: str, num_slots: int = 1) -> None:
        self.admission = Admission(make_policy(policy), LeastLoaded())
        limits = WorkerLimits(400, 4, num_slots, 256, memory_threshold=1.0)
        self.batch = self.admission.add_worker(limits)
        self.arrivals = 0
        self.order: list[Sequence] = []

    def arrive(self, prompt: list[int], max_tokens: int = 2, **fields: object) -> Sequence:
        tokens = np.array(prompt, np.int32)
        sequence = Sequence(tokens, GREEDY, max_tokens, (), self.arrivals, **fields)
        self.arrivals += 1
        self.admission.waiting.push(sequence)
        return sequence

    def step(self) -> int:
        """Admits and runs one step; returns the number of computed tokens."""
        self.order += [admitted.sequence for admitted in self.admission.admit()]
        plan = self.batch.plan()
        if plan is None:
            return 0
        outcome = self.batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        for slot in outcome.slots[outcome.ended].tolist():
            self.batch.finish(slot, State.COMPLETED)
        return plan.num_tokens

    def run(self) -> list[int]:
        """Runs until nothing is left; returns the arrival numbers in the order of admission."""
        while self.step():
            pass
        return [sequence.arrival for sequence in self.order]


def test_deadline_goes_before_arrival() -> None:
    played = Played("deadline")
    for deadline in (1000, 900, 300, 1000, 600):
        played.arrive([1, 2], deadline=deadline)
    assert played.run() == [2, 4, 1, 0, 3]


def test_the_longest_cached_prefix_goes_first() -> None:
    played = Played("longest-prefix")
    shared = list(range(100, 116))
    played.arrive([*shared, 1])
    played.run()
    played.arrive([1] * 20)
    played.arrive([*shared[:8], 2, 2, 2, 2])
    played.arrive([*shared, 3])
    assert played.run() == [0, 3, 2, 1]


def test_what_is_cached_while_it_waits_counts() -> None:
    played = Played("longest-prefix")
    for prompt in ([7] * 20, [8] * 20, [7] * 20):
        played.arrive(prompt)
    assert played.run() == [0, 2, 1]


def test_a_request_without_a_prefix_is_passed_over_a_limited_number_of_times() -> None:
    played = Played("longest-prefix")
    shared = list(range(100, 116))
    played.arrive(shared)
    played.run()
    unlucky = played.arrive([1] * 20)
    for _ in range(3 * MAX_OVERTAKEN):
        played.arrive(shared)
        played.arrive(shared)
        while len(played.order) < played.arrivals // 2:
            played.step()
    assert unlucky in played.order
    assert played.order.index(unlucky) <= MAX_OVERTAKEN + 1


def test_a_preempted_sequence_keeps_its_place() -> None:
    for name in ("longest-prefix", "fair-share"):
        played = Played(name)
        preempted = played.arrive([1] * 20, 10, tenant="heavy")
        played.step()
        played.arrive([2] * 20, tenant="light")
        played.batch.finish(preempted.slot, State.PENDING)
        played.admission.waiting.push(preempted)
        assert played.run() == [0, 0, 1], name


def test_tenants_get_equal_shares_of_tokens_however_many_requests_they_send() -> None:
    played = Played("fair-share", num_slots=4)
    for _ in range(300):
        played.arrive([1] * 4, 16, tenant="many")
    for _ in range(60):
        played.arrive([2] * 4, 64, tenant="long")
    while len(played.admission.waiting) and len(played.order) < 150:
        played.step()
    served: Counter[str] = Counter()
    for sequence in played.order:
        served[sequence.tenant] += 4 + sequence.max_tokens
    assert 0.8 < served["many"] / served["long"] < 1.25


def test_cached_tokens_cost_a_tenant_nothing() -> None:
    """Two tenants send equal loads; one has prompts with cached KV, and is admitted more often."""
    played = Played("fair-share")
    shared = list(range(1, 101))
    played.arrive(shared, tenant="cached")
    played.run()
    for number in range(30):
        played.arrive([*shared, 200 + number], tenant="cached")
        played.arrive([300 + number] * 101, tenant="computed")
    while len(played.order) < 31:
        played.step()
    served = Counter(sequence.tenant for sequence in played.order[1:])
    assert served["cached"] > 3 * served["computed"]


def test_a_tenant_that_paused_has_no_credit() -> None:
    played = Played("fair-share")
    for _ in range(50):
        played.arrive([1, 1], tenant="busy")
    played.arrive([2, 2], tenant="idle")
    while len(played.order) < 40:
        played.step()
    for _ in range(20):
        played.arrive([2, 2], tenant="idle")
    played.run()
    assert Counter(s.tenant for s in played.order[40:60]) == {"busy": 10, "idle": 10}


def test_a_policy_of_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lifo_policy.py").write_text(
        "from pagewire.scheduler.core.queue.policy import SchedulingPolicy\n"
        "class Lifo(SchedulingPolicy):\n"
        "    def key(self, sequence):\n"
        "        return (-sequence.arrival,)\n"
    )
    info = tmp_path / "lifo_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lifo-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pagewire.scheduling_policies]\nlifo = lifo_policy:Lifo\nbroken = builtins:dict\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    played = Played("lifo")
    for _ in range(3):
        played.arrive([1, 2])
    assert played.run() == [2, 1, 0]
    with pytest.raises(ValueError, match="'broken' is a dict"):
        make_policy("broken")
    with pytest.raises(ValueError, match=r"'other' is not known.* fair-share, broken, lifo"):
        make_policy("other")
