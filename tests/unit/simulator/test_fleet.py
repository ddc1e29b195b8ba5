"""Several schedulers replay one trace: nothing is lost, and each has its part."""

from dataclasses import asdict

from pagewire.bench.replays import Setup, replay
from pagewire.simulator.profile import load_profile
from pagewire.simulator.recording import Recording
from pagewire.simulator.trace import TraceRequest

DEVICE = load_profile("h200-llama-3.1-8b")


def run(requests: list[TraceRequest], schedulers: int, workers: int = 1) -> Recording:
    setup = Setup(
        profile=DEVICE.name,
        workers=workers,
        schedulers=schedulers,
        policy="fcfs",
        routing="least-loaded",
        cache_blocks=4000,
        block_size=16,
        num_slots=8,
        max_num_batched_tokens=2048,
        memory_threshold=0.9,
        long_prompt_share=1.0,
        prefix_caching=True,
    )
    return replay(requests, setup, DEVICE)


def load(count: int, tokens: int = 64, gap: float = 0.01) -> list[TraceRequest]:
    return [TraceRequest(n, n * gap, tokens, 20 + n % 7, None) for n in range(count)]


def test_every_request_ends_once_with_all_its_tokens() -> None:
    requests = load(200, tokens=300)
    found = run(requests, schedulers=4)
    assert len(found.requests) == len(found.finished) == 200
    assert found.samples[-1].output_tokens <= sum(r.output_length for r in requests)
    assert (found.workers, found.refused) == (4, 0)
    assert all(r.first_token is not None and r.first_token > r.arrival for r in found.finished)


def test_requests_that_do_not_meet_take_as_long_as_at_one_scheduler() -> None:
    requests = load(6, gap=5.0)
    alone, four = run(requests, 1), run(requests, 4)
    by_arrival = sorted(four.finished, key=lambda request: request.arrival)
    assert [asdict(each) for each in by_arrival] == [asdict(each) for each in alone.finished]


def test_short_prompts_go_to_the_least_loaded_scheduler() -> None:
    # 32 at once fill the slots of four schedulers evenly; one alone has room for 8.
    requests = load(32, gap=0.0)
    four = run(requests, 4)
    assert all(r.admitted == 0.0 for r in four.finished)
    waited = [r for r in run(requests, 1).finished if r.admitted]
    assert len(waited) == 24


def test_prompts_with_the_same_beginning_meet_at_one_scheduler() -> None:
    conversations = [
        TraceRequest(n, n * 2.0, 512, 8, (n % 3,)) for n in range(12)
    ]  # each of three prompts arrives four times, after the previous one has ended
    found = run(conversations, 4)
    assert sum(r.cached_tokens > 0 for r in found.finished) == 9
