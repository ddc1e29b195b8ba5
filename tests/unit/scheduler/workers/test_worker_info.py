"""From a WorkerInfo and the settings to limits."""

import pytest

from pagewire.config import SchedulerConfig
from pagewire.scheduler.core.kv.host_tier import NO_HOST_MEMORY, HostMemory
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.workers.worker_info import (
    model_pooling,
    pool_tokens,
    unlike,
    worker_limits,
)
from pagewire.v1 import worker_pb2 as pb


def info(**changes: float) -> pb.WorkerInfo:
    costs = {
        "host_blocks": 9,
        "save_block_seconds": 0.1,
        "load_block_seconds": 0.2,
        "prefill_token_seconds": 0.3,
        "prefill_pair_seconds": 0.0,
    }
    sizes = {
        "block_size": 16,
        "num_blocks": 50,
        "num_slots": 8,
        "max_model_len": 700,
        "max_num_batched_tokens": 64,
    }
    return pb.WorkerInfo(**(sizes | costs | changes))


def test_the_smaller_limit_of_worker_and_settings_holds() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=100, memory_threshold=0.5)
    limits = worker_limits(config, info())
    assert (limits.num_slots, limits.max_num_batched_tokens) == (4, 64)
    assert (limits.memory_threshold, limits.max_model_len) == (0.5, 700)
    assert limits.host == HostMemory(9, 0.1, 0.2, 0.3, 0.0)
    assert worker_limits(SchedulerConfig(max_num_batched_tokens=5), info()).num_slots == 5


@pytest.mark.parametrize(
    "name", ["block_size", "num_slots", "max_model_len", "max_num_batched_tokens"]
)
def test_impossible_sizes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"its {name} is 0"):
        worker_limits(SchedulerConfig(), info(**{name: 0}))


def test_host_memory_needs_the_prefix_cache() -> None:
    limits = worker_limits(SchedulerConfig(prefix_caching=False), info())
    assert limits.host == NO_HOST_MEMORY


@pytest.mark.parametrize(
    ("wrong", "value", "words"),
    [
        ("save_block_seconds", 0.0, "it has 9 host_blocks and no save_block_seconds"),
        ("load_block_seconds", -1.0, "no load_block_seconds"),
        ("prefill_token_seconds", float("nan"), "no prefill_token_seconds"),
        ("prefill_pair_seconds", -0.1, "its prefill_pair_seconds is -0.1"),
    ],
)
def test_impossible_costs_are_refused(wrong: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        worker_limits(SchedulerConfig(), info(**{wrong: value}))
    assert (
        worker_limits(SchedulerConfig(), info(host_blocks=0, **{wrong: value})).host.num_blocks == 0
    )


def test_workers_with_and_without_one_answer_are_told_apart() -> None:
    usual, invariant = info(), info(batch_invariant=True)
    assert unlike(usual, []) is None
    assert unlike(invariant, [invariant, invariant]) is None
    assert "has --batch-invariant, unlike others" in (unlike(invariant, [invariant, usual]) or "")
    assert "has no --batch-invariant" in (unlike(usual, [invariant]) or "")


def test_a_worker_that_pools_says_how() -> None:
    assert model_pooling(info()) is None
    given = info()
    given.pooling.MergeFrom(
        pb.Pooling(
            task="embed",
            size=7,
            activation="normalize",
            whole_prompt=True,
            pair_format="tokenizer",
        )
    )
    expected = ModelPooling("embed", 7, "normalize", True, "tokenizer")
    assert model_pooling(given) == expected
    given.pooling.task = "paint"
    with pytest.raises(ValueError, match="its pooling has the task 'paint'"):
        model_pooling(given)


def test_a_window_and_the_longest_sequence_of_its_pool() -> None:
    given = info(window=33, host_blocks=0, prefix_groups=True)
    limits = worker_limits(SchedulerConfig(), given)
    assert (limits.window, limits.reach) == (33, 2)
    assert not limits.prefix_groups, "tables have gaps"
    assert pool_tokens(given) > 700
    assert pool_tokens(info(window=33, num_blocks=3)) == 32, "the pool holds no window"
    assert pool_tokens(info()) == 49 * 16


def test_host_memory_beside_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="9 host_blocks beside a window of 33"):
        worker_limits(SchedulerConfig(), info(window=33))


def test_drafts_beside_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="max_drafts 3 beside a window of 33"):
        worker_limits(SchedulerConfig(), info(window=33, host_blocks=0, max_drafts=3))
