"""Passes of an EAGLE-3 head, and the end of a step, on the kernels and in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.eagle.config import read_eagle_config
from pagewire.worker.model.eagle.loading import load_eagle_head
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.ops import Name, load_ops
from pagewire.worker.ops.contract.drafts import COUNTS, TOKENS, LocatedRows
from pagewire.worker.ops.contract.step import NUM_INPUTS, WRITE_SLOTS
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.graphs import draft_passes
from pagewire.worker.runtime.graphs.draft_passes import LASTS, PassKind
from pagewire.worker.runtime.graphs.eagle_passes import EaglePasses
from support.eagle_heads import save_head
from support.kernels.comparison import assert_near
from support.models.tiny_models import VOCAB, save_model

LIMITS = Limits(
    vocab_size=VOCAB,
    num_slots=3,
    block_size=16,
    num_blocks=8,
    max_model_len=48,
    max_num_batched_tokens=32,
    max_drafts=3,
    drafts_on_device=True,
    draft_model=True,
)
PADDING = LIMITS.padding_slot
LENGTHS = (21, 5)  # of the sequences; the step draws their last token


class _NoStaging:
    def __init__(self, size: int) -> None:
        pass


def followed(folder: Path, ops: Name, device: torch.device) -> tuple[Tensor, ...]:
    """A body, a step with right and wrong drafts, and two passes before the next one.

    Returns the KV, the outputs kept by slot, the logits of the last pass, and the drafts.
    """

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    config = read_model_config(folder / "model").with_heads_for_kernels()
    weights = load_weights(folder / "model", config, torch.float32, device)
    target = Decoder(config, weights, load_ops(ops), rope_tables(config, 48, device))
    found = read_eagle_config(folder / "head", config)
    head = load_eagle_head(folder / "head", found, target, 48, seed=0)
    cache = empty_cache(head.config, LIMITS.num_blocks, 16, torch.float32, device)
    slots = DeviceSlots(LIMITS, device)
    slots.block_tables[:2, :2] = ints([[5, 3], [4, 2]])
    history = slots.history
    assert history is not None
    passes = EaglePasses(head, cache, slots, LIMITS, [4], [8])
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    states = torch.randn(40, config.hidden_size, generator=generator).to(device)
    # All positions except the last four of each sequence, as bodies write them.
    for slot, known in enumerate(tokens):
        count = len(known) - 4
        at = torch.arange(count, dtype=torch.int32, device=device)
        pairs = head.pairs(ints(known[1 : count + 1]), states[:count])
        passes._write(pairs, torch.full_like(at, slot), at)
    # Three drafts of each: the first one is right, or none. The last rows are padding.
    first = [len(known) - 4 for known in tokens]
    rows = LocatedRows(
        slots=ints([0, 0, 0, 0, 1, 1, 1, PADDING]),
        positions=ints([*(first[0] + i for i in range(4)), *(first[1] + i for i in range(3)), 0]),
        lengths=ints([0] * 8),
        indices=ints([0] * 8),
    )
    places = ints([0, 1, 2, 3, 0, 1, 2, 0])
    passes._take(states[:8].clone(), rows.slots, rows.positions, places)
    results = torch.zeros(5, 8, dtype=torch.int32, device=device)
    results[TOKENS] = ints([*tokens[0][-3:], 9, *tokens[1][-3:], -2])
    results[COUNTS] = ints([3, 99, 99, 99, 1, 99, 99, 1])
    passes._results[:] = results
    passes._follow(8)
    outputs = passes._outputs[:2].clone()
    for slot, (known, at) in enumerate(zip(tokens, (first[0] + 3, first[1] + 1), strict=True)):
        history.tokens[slot, : len(known)] = ints(known)
        history.positions[slot] = at
        history.limits[slot] = 48
    inputs = passes._rows(4)
    inputs.zero_()
    inputs[0] = ints([0, 1, PADDING, PADDING])
    inputs[WRITE_SLOTS:NUM_INPUTS] = ints([[PADDING] * 4, [0] * 4, [0] * 4])
    inputs[LASTS] = ints([1, 1, -1, -1])
    passes._pass(4, PassKind(False, first=True))
    passes._pass(4, PassKind(False))
    assert inputs[0].tolist() == [PADDING] * 4
    assert history.num_drafts.tolist() == [2, 2, 0, 0]
    return cache.storage[:, 1:], outputs, passes._logits[:2].clamp(min=-1e3), history.drafts[:2]


def test_a_head_on_the_kernels_gives_what_torch_gives(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_passes, "Staging", _NoStaging)
    save_model(tmp_path / "model", "llama")
    save_head(
        tmp_path / "head", tmp_path / "model", 150, eagle_aux_hidden_state_layer_ids=(0, 1, 2)
    )
    with torch.inference_mode():
        want = followed(tmp_path, "torch", device)
        got = followed(tmp_path, "triton", device)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert theirs.abs().max() > 0.1
        assert_near(ours, theirs, 1e-5)
    assert torch.equal(got[3], want[3])
