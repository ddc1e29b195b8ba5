"""The WorkerInfo message: limits, sizes of the backend, costs of host memory."""

from dataclasses import replace

from pagewire.simulator.backend import SimulatedBackend
from pagewire.simulator.step_time import StepTime
from pagewire.worker.protocol.backend import HostCosts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.worker_info import worker_info

STEP_TIME = StepTime(0.01, 0, 0, 0, 0)


def limits(host_blocks: int) -> Limits:
    return Limits(1000, 8, 16, 64, 512, 256, host_blocks)


def test_it_holds_the_limits_and_what_the_backend_measured() -> None:
    backend = SimulatedBackend(limits(5), STEP_TIME, 0, 70, 80, HostCosts(0.1, 0.2, 0.3, 0.4))
    info = worker_info("name", "bfloat16", "a device", limits(5), backend)
    assert (info.model, info.dtype, info.device) == ("name", "bfloat16", "a device")
    assert (info.vocab_size, info.num_slots, info.block_size, info.num_blocks) == (1000, 8, 16, 64)
    assert (info.max_model_len, info.max_num_batched_tokens, info.host_blocks) == (512, 256, 5)
    assert (info.weight_bytes, info.kv_cache_bytes) == (70, 80)
    assert (info.save_block_seconds, info.load_block_seconds) == (0.1, 0.2)
    assert (info.prefill_token_seconds, info.prefill_pair_seconds) == (0.3, 0.4)


def test_it_says_behind_which_window_blocks_may_be_given_up() -> None:
    backend = SimulatedBackend(limits(0), STEP_TIME, 0)
    assert not worker_info("m", "float32", "d", limits(0), backend).window
    windowed = replace(limits(0), window=40)
    assert worker_info("m", "float32", "d", windowed, backend).window == 40


def test_each_message_has_an_instance_of_its_own_and_no_costs_without_host_memory() -> None:
    backend = SimulatedBackend(limits(0), STEP_TIME, 0)
    first, second = (worker_info("m", "float32", "d", limits(0), backend) for _ in range(2))
    assert first.instance_id != second.instance_id
    assert not first.save_block_seconds
    assert not first.prefill_token_seconds


def test_it_says_whether_results_depend_on_the_request_alone() -> None:
    backend = SimulatedBackend(limits(0), STEP_TIME, 0)
    assert not worker_info("m", "float32", "d", limits(0), backend).batch_invariant
    assert worker_info("m", "d", "d", limits(0), backend, batch_invariant=True).batch_invariant
