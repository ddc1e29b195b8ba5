"""Launches find the kernels that the compile pool has compiled for Hopper, on any machine.

Kernels are compiled in a separate process, because Triton's interpreter, which other tests use,
replaces the compiler. Run as a script, this file prints a report as JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.worker.startup.compile_pool import CompileJob, CompilePool
from support.kernels.clean_process import report_of


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches() -> None:
    """Launch kernels with constants of every kind, and kernels that share jitted functions."""
    from kernels.attention.test_hopper import HALVES, HEADS
    from kernels.attention.test_hopper import launch as prefill
    from kernels.compile.test_attention import decode
    from kernels.compile.test_invariant import decode as decode_in_segments
    from kernels.compile.test_pointwise import meta_state
    from kernels.compile.test_quantized import grouped, inputs, scaled
    from pagewire.worker.ops.triton import linear, sampling
    from pagewire.worker.ops.triton.invariant import linear as ordered
    from pagewire.worker.ops.triton.streamed.config import stream_config

    sampling.sample(meta(8, 4096), meta_state(8))
    sampling.sample(meta(8, 4096), meta_state(8), filtered=False)
    x = meta(1, 256)
    linear.norm_linear(x, meta(256), 1e-6, meta(512, 256))
    inputs(8, torch.float8_e4m3fn, None)
    scaled(8, torch.int8, (1, 4096))
    grouped(8, 4, 128, zeros=True)
    decode(64, 16, 8, 128)
    decode_in_segments(1, 16, 8, 128)
    ordered.norm_linear(x, meta(256), 1e-6, meta(512, 256))
    tiles = stream_config(1, 512, 256, gated=True)
    ordered.norm_gate_up_silu_mul(x, None, 1e-6, meta(512, 256), config=tiles)
    prefill(HEADS[0], HALVES[0])


def wrong_launch() -> None:
    """Launch a kernel that does not compile: its block is not a power of two."""
    from pagewire.worker.ops.triton.rowwise.activation import ActivationConfig, silu_mul

    silu_mul(meta(1, 96), config=ActivationConfig(block=48, warps=4))


def compile_and_launch() -> dict[str, Any]:
    """Collect, compile in the pool, then launch as a worker does; no kernel is executed."""
    from unittest.mock import patch

    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver

    from pagewire.worker.ops import load_ops
    from pagewire.worker.ops.triton import linear, sampling, sampling_filters
    from pagewire.worker.ops.triton.attention import decode as attention_decode
    from pagewire.worker.ops.triton.attention import prefill_hopper as attention_prefill_hopper
    from pagewire.worker.ops.triton.invariant import decode as segment_decode
    from pagewire.worker.ops.triton.invariant import linear as ordered
    from pagewire.worker.ops.triton.streamed import gemm as streamed
    from pagewire.worker.startup.compile_server import TargetDriver
    from pagewire.worker.startup.triton_hooks import (
        collecting_kernels,
        on_compilation,
        recording_compilations,
    )

    class Hopper(TargetDriver):
        def get_current_stream(self, device: int) -> int:
            return 0

    def no_device(kernel: CompiledKernel) -> None:
        kernel._run = lambda *args: launched.append(kernel.name)

    pool, jobs, ready, launched = CompilePool(), [], [], []
    driver.set_active(Hopper(GPUTarget("cuda", 90, 32)))
    load_ops("triton")
    for module in (attention_decode, segment_decode, sampling):
        module.multiprocessors = lambda device: 132
    for module in (
        *(attention_decode, attention_prefill_hopper, linear, sampling, sampling_filters),
        *(segment_decode, ordered, streamed),
    ):
        module.dependent_launch = lambda device: True

    def submit(job: CompileJob) -> None:
        jobs.append(job.kernel)
        pool.submit(job)

    with collecting_kernels(submit):
        launches()
        wrong_launch()
        launches()
    results = pool.finish()
    with patch.object(CompiledKernel, "_init_handles", no_device), recording_compilations() as here:
        on_compilation(ready.append)
        launches()
        compiled_here_before_the_wrong_one = list(here)
        launched_first, jobs_first = len(launched), len(jobs)
        with collecting_kernels(submit):
            launches()
        again = [len(launched) - launched_first, len(jobs) - jobs_first]
        try:
            wrong_launch()
        except Exception as error:
            refused = str(error)
    return {
        "jobs": jobs,
        "failed": [[result.kernel, result.error] for result in results if result.error],
        "compiled": [result.kernel for result in results if not result.error],
        "ready": ready,
        "compiled here": compiled_here_before_the_wrong_one,
        "refused": refused,
        "launched": launched_first,
        "launched and collected again": again,
    }


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(Path(__file__))


def test_launches_find_what_the_pool_has_compiled(report: dict[str, Any]) -> None:
    assert report["compiled here"] == []
    assert sorted(report["ready"]) == sorted(report["compiled"])
    assert {
        "_draw_kernel",
        "_search_kernel",
        "_vector_kernel",
        "decode_kernel",
        "prefill_hopper_kernel",
        "_segment_decode_kernel",
        "_ordered_kernel",
        "stream_kernel",
    } < {*report["ready"]}


def test_each_variant_is_compiled_once(report: dict[str, Any]) -> None:
    assert len(report["jobs"]) == len(report["compiled"]) + len(report["failed"])
    assert report["jobs"].count("_draw_kernel") == 2  # with filters and without
    assert report["jobs"].count("_vector_kernel") == 1


def test_kernels_that_are_loaded_are_not_launched_while_others_are_collected(
    report: dict[str, Any],
) -> None:
    assert report["launched"] > 0
    assert report["launched and collected again"] == [0, 0]


def test_a_variant_that_fails_is_left_to_the_worker(report: dict[str, Any]) -> None:
    ((kernel, error),) = report["failed"]
    assert kernel == "_silu_mul_kernel"
    assert error.startswith("CompilationError")
    assert "power of 2" in report["refused"]


def test_a_pool_that_died_returns_nothing_and_logs_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = CompilePool()
    pool.close()
    for _ in range(2):
        pool.submit(
            CompileJob(
                ("cuda", 90, 32),
                "pagewire.worker.ops.triton.rowwise.norm",
                "_rms_norm_kernel",
                "{}",
            )
        )
    assert pool.finish() == []
    assert "ended with status -9" in caplog.text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        print(json.dumps(compile_and_launch()))
