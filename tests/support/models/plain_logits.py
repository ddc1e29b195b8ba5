"""The logits of a worker's decoder for a prompt, without a scheduler."""

from pathlib import Path

import torch
from torch import Tensor

from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.decoder import Batch, Decoder, Prefill
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.ops import load_ops

BLOCK_SIZE = 16
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    length: int,
    config: ModelConfig | None = None,
    padded: bool = ON_GPU,
) -> Decoder:
    """A decoder for prompts of up to `length` tokens; `config` replaces that of the folder.

    With `padded`, heads have a size that the Triton kernels read.
    """
    config = config or read_model_config(folder)
    config = config.with_heads_for_kernels() if padded else config
    weights = load_weights(folder, config, dtype, DEVICE)
    tables = rope_tables(config, length, DEVICE)
    return Decoder(config, weights, load_ops("triton" if ON_GPU else "torch"), tables)


def prompt_logits(decoder: Decoder, prompt: list[int]) -> Tensor:
    """The logits of every token of a prompt, `[tokens, vocab]` float32 on the CPU."""
    count, blocks = len(prompt), -(-len(prompt) // BLOCK_SIZE)
    dtype = decoder.weights.embedding.dtype
    cache = empty_cache(decoder.config, 1 + blocks, BLOCK_SIZE, dtype, DEVICE)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    batch = Batch(
        token_ids=ints(*prompt),
        positions=ints(*range(count)),
        slots=ints(*[0] * count),
        num_decodes=0,
        decode_lengths=ints(),
        prefill=Prefill(slots=ints(0), starts=ints(0, count), lengths=ints(count), longest=count),
    )
    with torch.inference_mode():
        hidden = decoder.hidden(batch, cache, ints(*range(1, 1 + blocks))[None])
        return decoder.logits(hidden).float().cpu()


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The error of all values together, relative to their norm."""
    difference = torch.cat(found) - torch.cat(exact)
    return float(difference.norm() / torch.cat(exact).norm())
