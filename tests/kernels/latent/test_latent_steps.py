"""A mixed step of a model with latent attention on the kernels, padded like captured graphs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.decoder import Batch, Decoder, Prefill, SampledTokens
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.ops import Name, load_ops
from support.kernels.comparison import assert_near
from support.models.tiny_models import VOCAB, save_model

FIRST = [7, 90, 12, 180, 3, 44] * 4
SECOND = [5, 6, 99, 8, 150, 11, 2, 73, 19]
PADDING = 2  # the slot of padding tokens


def steps(folder: Path, ops: Name, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of the rows of a mixed step, and of all tokens of its chunk.

    The first prompt is computed, then its next token together with the second prompt's last tokens.
    """

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    config = read_model_config(folder).with_heads_for_kernels()
    weights = load_weights(folder, config, torch.float32, device)
    decoder = Decoder(config, weights, load_ops(ops), rope_tables(config, 64, device))
    cache = empty_cache(config, 8, 16, torch.float32, device)
    tables = ints([[5, 1, 3], [4, 2, 0], [0, 0, 0]])
    done = len(SECOND) - 4
    count = len(FIRST) + done
    first = Batch(
        token_ids=ints([*FIRST, *SECOND[:done]]),
        positions=ints([*range(len(FIRST)), *range(done)]),
        slots=ints([0] * len(FIRST) + [1] * done),
        num_decodes=0,
        decode_lengths=ints([]),
        prefill=Prefill(
            ints([0, 1]), ints([0, len(FIRST), count]), ints([len(FIRST), done]), len(FIRST)
        ),
    )
    decoder.hidden(first, cache, tables)
    # One decode row of three, a chunk of four tokens, an empty chunk, three tokens of padding.
    mixed = Batch(
        token_ids=ints([VOCAB - 1, *SECOND[done:], 0, 0, 0]),
        positions=ints([len(FIRST), *range(done, len(SECOND)), 0, 0, 0]),
        slots=ints([0, 1, 1, 1, 1, *[PADDING] * 3]),
        num_decodes=3,
        decode_lengths=ints([len(FIRST) + 1, -1, -1]),
        prefill=Prefill(ints([1, PADDING]), ints([1, 5, 8]), ints([len(SECOND), 0]), 8),
    )
    residual = weights.embedding[mixed.token_ids]
    out = residual.new_empty(8, config.num_heads, config.query_dim)
    queries = decoder.body(residual, mixed, cache, tables, out=out)
    assert queries.data_ptr() == out.data_ptr()
    lengths = ints([len(FIRST) + 1, len(SECOND)])
    sampled = SampledTokens(ints([0, 4]), ints([0, 1]), lengths)
    hidden = decoder.sampled_hidden(residual, queries, sampled, cache, tables)
    chunk = Prefill(ints([1]), ints([0, 4]), ints([len(SECOND)]), 4)
    attended = decoder.last_attention(queries[1:5].contiguous(), chunk, cache, tables)
    scored = decoder.after_last_attention(attended, residual[1:5])
    return decoder.logits(hidden), decoder.logits(scored)


@pytest.mark.parametrize("variant", ["deepseek-v2-lite", "deepseek-v3", "youtu"])
def test_a_mixed_step_gives_the_logits_of_whole_sequences(
    tmp_path: Path, variant: str, device: torch.device
) -> None:
    model = save_model(tmp_path, variant, num_hidden_layers=2)
    with torch.inference_mode():
        whole = [
            model(torch.tensor([tokens])).logits[0] for tokens in ([*FIRST, VOCAB - 1], SECOND)
        ]
        expected = torch.stack([logits[-1] for logits in whole]).to(device)
        for ops in ("torch", "triton"):
            rows, scored = steps(tmp_path, ops, device)
            assert_near(rows, expected, 1e-5)
            assert_near(scored, whole[1][-4:].to(device), 1e-5)
