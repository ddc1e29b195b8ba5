"""The models and settings that `--batch-invariant` accepts; all others are refused by name.

The mode accepts what `tests/kernels/invariant` compares by bits: four families with layers of
Llama's form, which generate text, with all operations from `ops.triton.invariant`.
"""

from typing import Literal

import torch

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.fused_layer import is_fused
from pagewire.worker.model.pooling import PoolingConfig

# Families that the tests of this mode cover, here and on a GPU.
_COMPARED = ("llama", "mistral", "qwen2", "qwen3")


def check_one_answer(
    model: ModelConfig,
    pooling: PoolingConfig | None,
    kernels: Literal["torch", "triton"],
    device: torch.device,
    longest: int,
) -> None:
    """Refuses what would not keep `--batch-invariant`; sequences have at most `longest` tokens.

    Raises:
        SetupError: the mode cannot be kept; the message names the setting, or the family and its
            unsupported part.
    """
    if kernels != "triton":
        raise SetupError(
            f"--batch-invariant needs the triton operations; these are {kernels}, on the device "
            f"{device}: use --ops triton on an NVIDIA GPU, or leave --batch-invariant out"
        )
    if pooling is not None:
        raise SetupError(
            f"--batch-invariant is for models that generate text; the task of this one is "
            f"{pooling.task}: leave --batch-invariant out"
        )
    if (part := _unlike_llama(model, longest)) is not None:
        raise SetupError(
            f"--batch-invariant cannot be kept for {model.family} with {part}: results may depend "
            "on the batch there; leave --batch-invariant out"
        )


def _unlike_llama(model: ModelConfig, longest: int) -> str | None:
    """The first part of a model whose bits may depend on the batch; None if there is none."""
    windows = [window for window in model.windows if window is not None and window < longest]
    found = {
        "latent attention": model.latent is not None,
        "experts": model.experts is not None,
        "quantized weights": model.quantization is not None,
        # A window that no sequence exceeds does not count.
        f"a sliding window of {min(windows, default=0)} tokens, less than --max-model-len": windows,
        "a soft cap of attention scores": model.attention_soft_cap is not None,
        "a soft cap of logits": model.logit_soft_cap is not None,
        "LayerNorm": model.norm == "layer",
        "norms of 1 + weight": model.norm == "rms_plus_one",
        "norms behind attention or the MLP": model.block in ("post", "sandwich"),
        "attention beside the MLP": model.block == "parallel",
        "norms of whole queries and keys": model.qk_norm == "projection",
        f"the activation {model.activation}": model.activation != "silu",
        "an MLP without a gate": not model.gated,
        "biases of the MLP": model.mlp_bias,
        "layers that are not of Llama's form": not is_fused(model),
        # On an H200 a GEMM that normalizes 200 columns had other bits, and wrong ones.
        "sizes that are not multiples of 16": any(
            size % 16
            for size in (
                model.hidden_size,
                model.intermediate_size,
                model.num_heads * model.served_head_dim,
            )
        ),
        "layers that were not compared by bits": model.family not in _COMPARED,
    }
    return next((part for part, has in found.items() if has), None)
