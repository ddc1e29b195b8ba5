"""Checks on the worker's own device that kernels with one order of addition have the same bits.

Tensor cores add in the same order for all tiles, but this was measured only on some GPUs and
versions of Triton. So a worker with `--batch-invariant` checks it at its start, and refuses to
start if the bits differ.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.weights import Weights
from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.triton.invariant import linear as gemms
from pagewire.worker.ops.triton.invariant.decode import decode_attention
from pagewire.worker.ops.triton.invariant.linear_config import any_tokens
from pagewire.worker.ops.triton.invariant.prefill import prefill_attention
from pagewire.worker.ops.triton.invariant.segments import SEGMENT, TILE

# Numbers of tokens with kernels or tiles of their own; the last one takes several programs.
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 200)
# Two segments and a part of a third one, whose last tile is not full.
_LENGTH = 2 * SEGMENT + TILE + 5
_POSITIONS = (0, 1, TILE - 1, TILE, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 1, _LENGTH - 1)


def check_invariance(
    config: ModelConfig,
    weights: Weights,
    block_size: int,
    dtype: torch.dtype,
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> None:
    """Compares by bits GEMMs of several numbers of tokens, and decode with prefill attention.

    `same` compares two results. While kernels are only looked up, results have no values, so it
    should return True.

    Raises:
        SetupError: some bits differ.
    """
    layer, device = weights.layers[0], weights.embedding.device
    matrices = {
        "qkv": layer.qkv,
        "output": layer.output,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "head": weights.head,
    }
    for name, weight in matrices.items():
        assert isinstance(weight, Tensor)  # quantized models are refused earlier
        difference = _gemm_difference(weight, config.norm_eps, same, gated=name == "gate_up")
        if (tokens := difference) is not None:
            raise _refusal(f"the {name} projection of {tokens} tokens", device)
    if (position := _attention_difference(config, block_size, dtype, device, same)) is not None:
        raise _refusal(f"decode attention at position {position}", device)


def _refusal(what: str, device: torch.device) -> SetupError:
    return SetupError(
        f"--batch-invariant cannot be kept on {device} with this version of Triton: {what} adds in "
        "another order; leave --batch-invariant out"
    )


def _gemm_difference(
    weight: Tensor, eps: float, same: Callable[[Tensor, Tensor], bool], gated: bool
) -> int | None:
    """The first number of tokens whose results differ from those in the largest batch.

    A `gated` weight is compared with its norm and activation.
    """
    k = weight.shape[1]
    x = weight.new_empty((_TOKENS[-1], k)).normal_()
    config = any_tokens(len(x), k, weight.element_size())
    if gated:
        expected = gemms.norm_gate_up_silu_mul(x, None, eps, weight, config=config)
    else:
        expected = gemms.linear(x, weight, config=config)
    for tokens in _TOKENS[:-1]:
        if gated:
            found = gemms.norm_gate_up_silu_mul(x[:tokens], None, eps, weight)
        else:
            found = gemms.linear(x[:tokens], weight)
        if not same(found, expected[:tokens]):
            return tokens
    return None


def _attention_difference(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    same: Callable[[Tensor, Tensor], bool],
) -> int | None:
    """The first position whose result as a decode row differs from its result in a prompt."""

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_()

    blocks = -(-_LENGTH // block_size)
    page = (config.num_kv_heads, block_size, config.served_head_dim)
    keys, values = draw(blocks + 1, *page), draw(blocks + 1, *page)
    scales = None
    if config.fp8_kv:
        keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
        scales = KVScales(*draw(2, *keys.shape[:3]).float().abs())
    q = draw(_LENGTH, config.num_heads, config.served_head_dim)
    table = int32(*range(blocks, 0, -1))[None]
    scale = config.attention_scale
    expected = prefill_attention(
        q,
        keys,
        values,
        table,
        int32(0),
        int32(0, _LENGTH),
        int32(_LENGTH),
        scale,
        _LENGTH,
        scales=scales,
    )
    lengths = int32(*(position + 1 for position in _POSITIONS))
    rows, slots = q[[*_POSITIONS]], torch.zeros_like(lengths)
    found = decode_attention(rows, keys, values, table, slots, lengths, scale, scales=scales)
    for row, position in enumerate(_POSITIONS):
        if not same(found[row], expected[position]):
            return position
    return None
