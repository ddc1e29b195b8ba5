"""A step that pools, with the kernels and with plain torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagewire.packing import Float32Array
from pagewire.worker.model.config import parse_model_config
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.pooling import Kind, PoolingConfig
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from pagewire.worker.ops import load_ops
from pagewire.worker.protocol.steps.device_plan import dummy_plan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.pooling import PoolingBackend

MODEL = parse_model_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
    }
)
LIMITS = Limits(
    vocab_size=64,
    num_slots=4,
    block_size=16,
    num_blocks=16,
    max_model_len=128,
    max_num_batched_tokens=64,
)


def vectors_of(ops: str, kind: Kind, device: torch.device) -> Float32Array:
    """The vectors of two chunks that end, after a step in which none ends."""
    weights = served_weights(MODEL, dummy_weights(MODEL, torch.float32, device, seed=0))
    tables = rope_tables(MODEL, LIMITS.max_model_len, device)
    decoder = Decoder(MODEL, weights, load_ops(ops), tables)
    with torch.inference_mode():
        pooling = PoolingConfig("embed", kind, "none")
        backend = PoolingBackend(decoder, LIMITS, torch.float32, pooling, None)
        ending = dummy_plan(LIMITS, decodes=0, chunks=2, chunk_length=9)
        assert ending.chunks is not None
        going_on = replace(
            ending,
            chunks=replace(ending.chunks, samples=np.zeros(2, np.bool_)),
            sample_slots=ending.sample_slots[:0],
            sample_indices=ending.sample_indices[:0],
        )
        none = backend.wait(backend.submit(going_on)).pooled
        assert none is not None
        assert none.shape == (0, MODEL.hidden_size)
        found = backend.wait(backend.submit(ending)).pooled
        assert found is not None
        return found


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_vectors_of_the_kernels_are_those_of_torch(kind: Kind, device: torch.device) -> None:
    by_kernels, by_torch = (vectors_of(ops, kind, device) for ops in ("triton", "torch"))
    assert np.abs(by_torch).max() > 0.1
    np.testing.assert_allclose(by_kernels, by_torch, rtol=0, atol=2e-5)
