"""The packed inputs of captured mixed steps, run through the decoder on the CPU."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.ops.triton.attention import prefill_hopper
from pagewire.worker.protocol.steps.device_plan import Chunks, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.runtime.graphs.mixed_layout import (
    BodySize,
    body_batch,
    body_length,
    body_sizes,
    pack_body,
    split_body,
)
from pagewire.worker.startup.loading import load_worker
from support.models.tiny_models import save_model

SIZES = [BodySize(24, 6, 4), BodySize(16, 2, 3), BodySize(64, 8, 16)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def mixed_plan() -> DevicePlan:
    """Three decode rows of slots 0 to 2, chunks of slots 3 and 4, of which the first samples."""
    return DevicePlan(
        starts=None,
        writes=None,
        decode_slots=ints(0, 1, 2),
        decode_positions=ints(4, 7, 0),
        chunks=Chunks(
            slots=ints(3, 4),
            starts=ints(0, 5, 12),
            tokens=np.arange(20, 32, dtype=np.int32),
            positions=np.concatenate((np.arange(2, 7), np.arange(7))).astype(np.int32),
            lengths=ints(7, 7),
            samples=np.array([True, False]),
            following=ints(0, 9),
        ),
        sample_slots=ints(0, 1, 2, 3),
        sample_indices=ints(1, 1, 1, 0),
        filtered=False,
    )


def load_backend(folder: Path) -> EagerBackend:
    save_model(folder, "qwen3")
    config = WorkerConfig(
        model=str(folder), device="cpu", num_slots=5, num_blocks=32, block_size=4, torch_threads=1
    )
    backend = load_worker(config).backend
    assert isinstance(backend, EagerBackend)
    return backend


@pytest.mark.parametrize("samples", [[True, False], [False, False]])
def test_the_last_layer_ends_with_what_samples(tmp_path: Path, samples: list[bool]) -> None:
    backend, plan = load_backend(tmp_path), mixed_plan()
    assert plan.chunks is not None
    chunks = replace(plan.chunks, samples=np.array(samples))
    rows = plan.num_decodes + sum(samples)
    plan = replace(plan, chunks=chunks, sample_slots=plan.sample_slots[:rows])
    decoder, computed = backend._decoder, []
    gated = decoder.ops.norm_gate_up_silu_mul

    def recorded(x: torch.Tensor, *others: object) -> torch.Tensor:
        computed.append(len(x))
        return gated(x, *others)

    ops: Any = SimpleNamespace(**{**vars(decoder.ops), "norm_gate_up_silu_mul": recorded})
    decoder = Decoder(decoder.config, decoder.weights, ops, decoder.tables)
    with torch.inference_mode():
        batch, *_ = backend._batch(plan)
        hidden = decoder.hidden(batch, backend._cache, backend._slots.block_tables)
    layers = decoder.config.num_layers
    assert computed == [plan.num_decodes + plan.num_prefilled] * (layers - 1) + [rows]
    assert len(hidden) == rows


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_padding_changes_nothing(tmp_path: Path, size: BodySize) -> None:
    backend = load_backend(tmp_path)
    decoder, state, limits = backend._decoder, backend._slots, backend.limits
    cache = empty_cache(
        decoder.config, limits.num_blocks, limits.block_size, torch.float64, backend.device
    )
    plan = mixed_plan()
    assert plan.chunks is not None
    with torch.inference_mode():
        # float64: GEMMs of other sizes round differently, in float32 by more than the bounds.
        for tensor in decoder.weights.tensors():
            tensor.data = tensor.double()
        state.block_tables[:5, :3] = torch.arange(1, 16, dtype=torch.int32).view(5, 3)
        state.last_tokens[:3] = torch.tensor([9, 8, 7], dtype=torch.int32)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_(generator=torch.Generator().manual_seed(3))
        before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
        batch, *_ = backend._batch(plan)
        expected = decoder.hidden(batch, cache, state.block_tables)
        written = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
        for tensor, value in zip((*cache.keys, *cache.values), before, strict=True):
            tensor.copy_(value)

        everything = decoder.hidden(replace(batch, sampled=None), cache, state.block_tables)
        assert batch.sampled is not None
        assert batch.sampled.rows.tolist() == [0, 1, 2, 7]
        torch.testing.assert_close(everything[batch.sampled.rows], expected)
        for tensor, value in zip((*cache.keys, *cache.values), before, strict=True):
            tensor.copy_(value)

        packed = pack_body(plan, plan.chunks, size, backend.limits.padding_slot)
        assert len(packed) == body_length(size)
        inputs = split_body(torch.from_numpy(packed), size)
        padded = replace(body_batch(inputs, size, state.last_tokens), sampled=batch.sampled)
        hidden = decoder.hidden(padded, cache, state.block_tables)
    torch.testing.assert_close(hidden, expected)
    for tensor, value in zip((*cache.keys, *cache.values), written, strict=True):
        torch.testing.assert_close(tensor[1:], value[1:])  # padding writes to the scratch block


def test_every_step_has_a_size() -> None:
    limits = Limits(
        vocab_size=10,
        num_slots=48,
        block_size=16,
        num_blocks=100,
        max_model_len=500,
        max_num_batched_tokens=1500,
    )
    sizes = body_sizes(limits)
    assert sizes == sorted(sizes)
    assert sizes[-1] == BodySize(1500, 48, 48)
    for smaller, larger in pairwise(sizes):
        assert larger.tokens <= 1.25 * smaller.tokens + 64
    plan = mixed_plan()
    fitting = [size for size in sizes if size.holds(plan)]
    assert fitting[0] == BodySize(32, 8, 32)


def test_only_the_largest_size_has_more_chunks_than_hoppers_kernel_of_attention() -> None:
    limits = Limits(
        vocab_size=10,
        num_slots=1000,
        block_size=16,
        num_blocks=5000,
        max_model_len=600,
        max_num_batched_tokens=16_384,
    )
    *others, largest = body_sizes(limits)
    assert max(size.chunks for size in others) == prefill_hopper.CHUNKS.value - 1
    assert others[-1] == BodySize(16_384, 255, 1000)
    assert largest == BodySize(16_384, 1000, 1000)
