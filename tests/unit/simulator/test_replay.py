"""Replays: the times of single requests by hand, then effects of cache, memory and routing."""

from itertools import pairwise

import numpy as np
import pytest

from pagewire.objectives import Objectives
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.host_tier import HostMemory
from pagewire.scheduler.core.routing import ROUTERS, Candidate
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.policies import make_policy
from pagewire.simulator.recording import Recording, RequestRecord
from pagewire.simulator.replay import Replay
from pagewire.simulator.report import kv_use, over_time, summarize
from pagewire.simulator.static_batching import run_static
from pagewire.simulator.step_time import StepTime
from pagewire.simulator.trace import TraceRequest, ideal_block_hit_rate
from support.sequences import GREEDY

# A step lasts 10 ms and 1 ms a row; prefill 0.1 ms a token.
TIME = StepTime(0.010, 0.001, 0.0, 0.0001, 0.0)
ANY = Objectives()


def replay(requests: list[TraceRequest], workers: int = 1, **settings: object) -> Recording:
    names = {"routing": "least-loaded", "policy": "fcfs"} | {
        name: settings.pop(name) for name in ("routing", "policy") if name in settings
    }
    defaults = {
        "num_blocks": 4000,
        "block_size": 16,
        "num_slots": 8,
        "max_num_batched_tokens": 2048,
        "memory_threshold": 0.9,
    }
    return Replay(
        policy=make_policy(str(names["policy"])),
        router=ROUTERS[str(names["routing"])](),
        limits=WorkerLimits(**(defaults | settings)),  # type: ignore[arg-type]
        num_workers=workers,
        step_time=TIME,
        interval=0.05,
    ).run(requests)


def plain(number: int, arrival: float, tokens: int, output: int) -> TraceRequest:
    return TraceRequest(number, arrival, tokens, output, None)


def hashed(number: int, arrival: float, *hash_ids: int, output: int = 4) -> TraceRequest:
    return TraceRequest(number, arrival, 512 * len(hash_ids), output, hash_ids)


def test_times_of_requests_that_do_not_meet() -> None:
    recording = replay([plain(0, 0.0, 100, 5), plain(1, 1.0, 200, 1)])
    first, second = recording.requests
    assert first.ttft == pytest.approx(0.010 + 100 * 0.0001)
    assert first.tpot == pytest.approx(0.011)
    assert second.ttft == pytest.approx(0.010 + 200 * 0.0001)
    assert second.tpot is None
    assert second.last_token == second.first_token
    assert recording.steps == 6
    assert recording.busy_seconds == pytest.approx(0.020 + 4 * 0.011 + 0.030)
    assert recording.seconds == pytest.approx(1.030)


def test_a_prompt_joins_after_the_steps_that_are_in_flight() -> None:
    """Run-ahead: at its arrival two steps are in flight, and the second has not begun."""
    recording = replay([plain(0, 0.0, 100, 20), plain(1, 0.0255, 100, 1)])
    # Steps end at 20, 31, 42 ms; those of 31 and 42 are in flight, then 21 ms with the prompt.
    assert recording.requests[1].first_token == pytest.approx(0.042 + 0.021)


def test_the_device_never_idles_while_there_is_work() -> None:
    recording = replay([plain(i, 0.0, 300, 30) for i in range(30)])
    assert recording.busy_seconds == pytest.approx(recording.seconds)
    assert summarize(recording, ANY)["device_utilization"] == pytest.approx(1.0)


def conversations() -> list[TraceRequest]:
    """Four conversations of five turns, one after another, under one system prompt."""
    return [
        hashed(5 * turn + talk, 5.0 * turn + talk, 0, *(10 * talk + t for t in range(1, turn + 2)))
        for turn in range(5)
        for talk in range(4)
    ]


def test_an_unlimited_cache_reaches_the_ideal_hit_rate() -> None:
    requests = conversations()
    ideal = ideal_block_hit_rate(requests)
    summary = summarize(replay(requests), ANY)
    # A request that ends with a known block would compute its last tokens; here none does.
    assert summary["block_hit_rate"] == ideal
    assert ideal == pytest.approx(1 - 21 / 80)
    smaller = [
        summarize(replay(requests, num_blocks=blocks), ANY)["block_hit_rate"]
        for blocks in (600, 400, 250)
    ]
    assert all(a > b for a, b in pairwise([ideal, *smaller]))
    assert summarize(replay(requests, prefix_caching=False), ANY)["block_hit_rate"] == 0


def test_round_robin_takes_turns_and_scatters_conversations() -> None:
    requests = conversations()
    scattered = summarize(replay(requests, workers=3, routing="round-robin"), ANY)
    assert 0 < scattered["block_hit_rate"] < ideal_block_hit_rate(requests)


def test_round_robin_passes_over_a_full_worker() -> None:
    router = ROUTERS["round-robin"]()
    admission = Admission(make_policy("fcfs"), router)
    workers = [admission.add_worker(WorkerLimits(8, 16, 1, 64, 0.9)) for _ in range(3)]
    asked = Sequence(np.ones(4, np.int32), GREEDY, 1, (), 0)
    candidates = [Candidate(worker, worker.find_cached(asked)) for worker in workers]
    chosen = [router.choose(asked, candidates) for _ in range(4)]
    assert chosen == [*candidates, candidates[0]]
    assert router.choose(asked, [candidates[0], candidates[2]]) is candidates[2]


def test_memory_pressure_preempts_and_nothing_is_lost() -> None:
    requests = [plain(i, 0.01 * i, 40, 60) for i in range(20)]
    recording = replay(requests, num_blocks=25, memory_threshold=1.0)
    assert len(recording.finished) == 20
    assert recording.preemptions > 0
    assert kv_use(recording)["kv_utilization_under_pressure"] > 0.7
    assert recording.samples[-1].output_tokens <= 20 * 60


def test_a_request_too_large_for_every_worker_is_refused_and_counted() -> None:
    recording = replay([plain(0, 0.0, 4000, 5), plain(1, 0.0, 40, 5)], num_blocks=100)
    assert recording.refused == 1
    assert [r.last_token is not None for r in recording.requests] == [False, True]


def test_priority_is_a_policy_of_the_core() -> None:
    """All have one priority: first come, first served."""
    requests = [plain(i, 0.0, 300, 30) for i in range(20)]
    a, b = replay(requests), replay(requests, policy="priority")
    assert [r.last_token for r in a.requests] == [r.last_token for r in b.requests]


def test_static_batches_wait_for_their_longest_output() -> None:
    requests = [plain(0, 0, 100, 11), plain(1, 0, 100, 1), plain(2, 0, 50, 3)]
    padded = run_static(requests, 2, 2048, TIME, padded=True)
    # 20 ms of prefill and 10 steps of 2 rows; then 10 + 5 ms and 2 steps of one row.
    assert padded.seconds == pytest.approx(0.030 + 10 * 0.012 + 0.015 + 2 * 0.011)
    alone = run_static(requests, 2, 2048, TIME, padded=False)
    assert alone.seconds == pytest.approx(padded.seconds - 10 * 0.001)
    assert padded.output_tokens_per_second == pytest.approx(15 / padded.seconds)


def record(arrival: float, ttft: float, tpot: float, output: int) -> RequestRecord:
    first = arrival + ttft
    last = first + tpot * (output - 1)
    return RequestRecord(arrival, 1000, output, 0, arrival, first, last, cached_tokens=250)


def test_a_summary_follows_its_definitions() -> None:
    recording = Recording(workers=2, total_blocks=100, block_size=16)
    recording.requests = [record(0, 0.1, 0.01, 11), record(1, 0.3, 0.03, 11), record(2, 0.2, 9, 1)]
    recording.seconds, recording.busy_seconds = 4.0, 6.0
    summary = summarize(recording, Objectives(ttft_ms=250, tpot_ms=20))
    assert summary["goodput_requests_per_second"] == pytest.approx(2 / 4)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["tpot_ms"]["mean"] == pytest.approx(20)
    assert summary["token_hit_rate"] == pytest.approx(0.25)
    assert summary["output_tokens_per_second"] == pytest.approx(23 / 4)
    assert summary["device_utilization"] == pytest.approx(0.75)


def test_curves_have_a_value_a_bin_and_gaps_without_requests() -> None:
    recording = replay([plain(0, 0.0, 100, 5), plain(1, 1.0, 200, 3)])
    curves = over_time(recording, bins=4)
    assert {len(curve) for curve in curves.values()} == {4}
    assert len(over_time(recording)["ttft_ms_p99"]) == 120
    assert curves["ttft_ms_p99"] == [pytest.approx(20), None, None, pytest.approx(30)]
    assert sum(c for c in curves["output_tokens_per_second"] if c) * recording.seconds / 4 > 5
    assert max(c for c in curves["device_utilization"] if c is not None) <= 1


def test_evicted_blocks_come_back_from_the_host_at_the_price_of_a_copy() -> None:
    """One conversation, another that needs its memory, the first one again."""
    requests = [hashed(i, 10.0 * i, *ids) for i, ids in enumerate([(1, 2), (3, 4), (1, 2)])]
    memory = HostMemory(100, save_block=0.0001, load_block=0.0002, prefill_token=0.0001)
    small = {"num_blocks": 70}
    without, recording = replay(requests, **small), replay(requests, **small, host=memory)
    assert [r.cached_tokens for r in without.requests] == [0, 0, 64]
    last = recording.requests[2]
    # Some of the first one's blocks are still on the device; its last token is computed always.
    assert last.cached_tokens == 1008
    assert 0 < last.loaded_tokens <= 1008
    assert recording.loaded_blocks == last.loaded_tokens // 16
    assert recording.saved_blocks >= recording.loaded_blocks
    expected = 0.010 + 16 * 0.0001 + recording.loaded_blocks * 0.0002
    saved_last = recording.saved_blocks - recording.loaded_blocks
    assert expected <= last.ttft + 1e-9
    assert last.ttft <= expected + saved_last * 0.0001 + 1e-9
    figures = summarize(recording, ANY)
    assert figures["host_hit_rate"] == pytest.approx(last.loaded_tokens / 3072)
    assert figures["token_hit_rate"] == pytest.approx(1008 / 3072)


def test_whole_sequences_prevent_preemption_and_waste_blocks() -> None:
    requests = [plain(i, 0.0, 40, 200) for i in range(12)]
    small = {"num_blocks": 40, "memory_threshold": 1.0}
    preempting = replay(requests, **small)
    queue = replay(requests, **small, whole_sequences=True)
    assert preempting.preemptions > 0
    assert queue.preemptions == 0
    assert len(queue.finished) == len(preempting.finished) == 12
    use = [kv_use(recording)["kv_utilization_under_pressure"] for recording in (queue, preempting)]
    assert use[0] < use[1]


def test_pauses_are_those_between_tokens_of_one_request() -> None:
    requests = [plain(0, 0.0, 16, 40), plain(1, 0.0, 16, 40)]
    assert replay(requests).longest_pause == pytest.approx(0.012)
    recording = replay(requests, num_blocks=6, memory_threshold=1.0)
    assert sum(recording.restarts.values()) == recording.preemptions > 0
    # At the end the first one needs so much that the second one has to wait for it.
    assert recording.longest_pause > 0.1
