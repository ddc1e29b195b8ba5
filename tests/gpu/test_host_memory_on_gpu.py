"""KV blocks that are saved to pinned host memory and loaded again, on a GPU."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from support.models.saved_blocks import COUNT, run_saved_and_loaded
from support.models.step_driver import local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]


@pytest.mark.parametrize("ops", ["torch", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_blocks_equal_saved_blocks(tmp_path: Path, ops: str, dtype: str) -> None:
    model = save_model(tmp_path, "llama")
    generator = random.Random(3)
    ours, theirs = ([generator.randrange(VOCAB) for _ in range(n)] for n in (40, 38))

    async def check() -> None:
        settings = {"device": "cuda", "ops": ops, "dtype": dtype, "num_slots": 4}
        async with local_worker(tmp_path, host_memory_gb=0.001, **settings) as worker:
            assert worker.limits.host_blocks > 6
            first = await run_saved_and_loaded(worker, ours, theirs)
            back, other, wrong = await run_saved_and_loaded(worker, ours, theirs)
            assert not worker.fatal
            costs = worker.loaded.backend.host_costs
        assert first == (back, other, wrong)
        assert wrong != back
        if dtype == "float32":
            assert back == greedy_tokens(model, ours, COUNT)
            assert other == greedy_tokens(model, theirs, COUNT)
        if ops == "triton":  # only Triton workers are warmed up here, and measure it
            assert costs is not None
            print(f"measured: {costs}")

    asyncio.run(check())


def test_copies_reach_half_the_speed_of_the_driver() -> None:
    """Blocks of Llama-3.1-8B, 2 MiB each, compared with one copy by the driver."""
    from pagewire.worker.ops.triton.blocks import copy_blocks

    parts, values, count = 64, 16384, 256
    blocks = torch.randn(parts, count, values, device="cuda").to(torch.bfloat16)
    host_blocks = torch.empty(count, parts, values, dtype=torch.bfloat16, pin_memory=True)
    numbers = torch.randperm(count, dtype=torch.int32).cuda()
    flat = host_blocks.view(-1)
    device_flat = blocks.view(-1)
    transposed = host_blocks.transpose(0, 1)

    def seconds(run: object) -> float:
        run()  # type: ignore[operator]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            run()  # type: ignore[operator]
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 5e3

    saved = seconds(lambda: copy_blocks(blocks, numbers, transposed, numbers))
    loaded = seconds(lambda: copy_blocks(transposed, numbers, blocks, numbers))
    to_host = seconds(lambda: flat.copy_(device_flat, non_blocking=True))
    to_device = seconds(lambda: device_flat.copy_(flat, non_blocking=True))
    rate = flat.nbytes / 1e9
    print(
        f"GB/s: saved {rate / saved:.1f} of {rate / to_host:.1f}, "
        f"loaded {rate / loaded:.1f} of {rate / to_device:.1f}"
    )
    assert saved < 2 * to_host
    assert loaded < 2 * to_device
