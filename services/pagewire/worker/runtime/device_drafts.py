"""The tokens of all sequences on the device: the source of row positions and drafts."""

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.worker.model.kv_cache import lazy_zeros
from pagewire.worker.ops.contract.drafts import (
    MAX_PREDICTED,
    OUT_OF_STEP,
    SURE_MATCH,
    TokenHistory,
)
from pagewire.worker.protocol.speculation.slot_outputs import SEARCHED
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start
from pagewire.worker.runtime.upload import upload

# Rows of a history are a multiple of this many tokens: Triton compiles another variant for others.
ALIGNMENT = 16


def token_history(limits: Limits, device: torch.device) -> TokenHistory:
    """Empty histories of all slots, the padding slot included.

    With a draft model, a match of one token does not count: the draft model is right more often.
    """
    slots = limits.num_slots + 1
    # The last token of the longest sequence is drawn after its last position.
    length = limits.max_model_len + 1
    first = SEARCHED

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(slots, *shape, dtype=torch.int32, device=device)

    return TokenHistory(
        rows=lazy_zeros((slots, first + length + -length % ALIGNMENT), torch.int32, device),
        positions=zeros(),
        limits=zeros(),
        drafts=zeros(limits.max_drafts),
        num_drafts=zeros(),
        drafters=zeros(),
        predictions=zeros(4),
        num_recent=zeros(),
        first=first,
        min_match=SURE_MATCH if limits.draft_model else 1,
    )


def start_histories(
    history: TokenHistory, sequences: tuple[Start, ...], max_model_len: int
) -> None:
    """Puts recent outputs, the known tokens and the predictions of sequences into their slots."""
    if not sequences:
        return
    width = history.tokens.shape[1]
    predictions = [_prediction(start, width) for start in sequences]
    slots, positions, limits, recent, states, tokens, predicted = upload(
        history.tokens.device,
        np.array([start.slot for start in sequences], np.int32),
        np.array([len(start.token_ids) - 1 for start in sequences], np.int32),
        np.array([last_position(start, max_model_len) for start in sequences], np.int32),
        np.array([len(start.recent) for start in sequences], np.int32),
        np.concatenate([_state(*each) for each in zip(sequences, predictions, strict=True)]),
        np.concatenate([part for start in sequences for part in (start.recent, start.token_ids)]),
        np.concatenate(predictions),
    )
    history.positions[slots] = positions
    history.limits[slots] = limits
    history.num_drafts[slots] = 0
    history.num_recent[slots] = recent
    history.predictions[slots] = states.view(len(sequences), -1)
    lengths = [len(start.recent) + len(start.token_ids) for start in sequences]
    for start, searched in zip(sequences, tokens.split(lengths), strict=True):
        begin = history.first - len(start.recent)
        history.rows[start.slot, begin : begin + len(searched)] = searched
    parts = predicted.split([len(each) for each in predictions])
    for start, part in zip(sequences, parts, strict=True):
        if len(part):
            history.tokens[start.slot, width - len(part) :] = part


def _prediction(start: Start, width: int) -> Int32Array:
    """The part of a prediction that fits after the known tokens of a row `[width]`."""
    return start.prediction[: max(0, min(width - len(start.token_ids), MAX_PREDICTED - 1))]


def _state(start: Start, prediction: Int32Array) -> Int32Array:
    """The state of a prediction `[4]`: an output that has begun may match any part of it."""
    generated = start.num_generated
    reached = OUT_OF_STEP if generated else 0
    return np.array([len(prediction), reached, min(generated, len(prediction)), 0], np.int32)


def last_position(start: Start, max_model_len: int) -> int:
    """The position of a sequence's last possible token, by the model's limit and its own."""
    more = start.max_new_tokens or INT32_MAX
    return min(len(start.token_ids) - 1 + more, max_model_len)
