"""The tokens of all sequences on the device: where rows are placed, and what guesses come from."""

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import INT32_MAX
from pagewire.worker.model.kv_cache import lazy_zeros
from pagewire.worker.ops.contract.drafts import TokenHistory
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start
from pagewire.worker.runtime.upload import upload

# Rows of a history are a multiple of so many tokens: Triton compiles another variant for others.
ALIGNMENT = 16


def token_history(limits: Limits, device: torch.device) -> TokenHistory:
    """Histories without tokens of all slots, the padding slot included."""
    slots = limits.num_slots + 1
    # The last token of the longest sequence is drawn behind its last position.
    length = limits.max_model_len + 1

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(slots, *shape, dtype=torch.int32, device=device)

    return TokenHistory(
        tokens=lazy_zeros((slots, length + -length % ALIGNMENT), torch.int32, device),
        positions=zeros(),
        limits=zeros(),
        guesses=zeros(limits.max_drafts),
        guessed=zeros(),
    )


def start_histories(
    history: TokenHistory, sequences: tuple[Start, ...], max_model_len: int
) -> None:
    """Puts the known tokens of sequences into their slots."""
    if not sequences:
        return
    slots, positions, limits, tokens = upload(
        history.tokens.device,
        np.array([start.slot for start in sequences], np.int32),
        np.array([len(start.token_ids) - 1 for start in sequences], np.int32),
        np.array([last_position(start, max_model_len) for start in sequences], np.int32),
        np.concatenate([start.token_ids for start in sequences]),
    )
    history.positions[slots] = positions
    history.limits[slots] = limits
    history.guessed[slots] = 0
    lengths = [len(start.token_ids) for start in sequences]
    for start, known in zip(sequences, tokens.split(lengths), strict=True):
        history.tokens[start.slot, : len(known)] = known


def last_position(start: Start, max_model_len: int) -> int:
    """The position of the last token that a sequence may get: the model's longest, or its own."""
    more = start.max_new_tokens or INT32_MAX
    return min(len(start.token_ids) - 1 + more, max_model_len)
