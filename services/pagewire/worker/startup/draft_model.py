"""Reads and loads the draft model or EAGLE head of `--speculate`, and times its drafts."""

from pathlib import Path

import numpy as np
import torch

from pagewire.config import WorkerConfig
from pagewire.models import resolve_model
from pagewire.worker.errors import SetupError
from pagewire.worker.measurement.draft_cost import measure_draft_cost
from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.eagle.config import EagleConfig, read_eagle_config
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.model.eagle.loading import load_eagle_head
from pagewire.worker.model.pooling import read_pooling
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.runtime.eagle_drafter import drafter_of
from pagewire.worker.startup.arranged_weights import arranged_weights

# The values of `--speculate` that need `--draft-model`.
WITH_MODEL = ("draft", "eagle")


def read_draft_model(
    config: WorkerConfig, target: ModelConfig, max_model_len: int
) -> tuple[Path, ModelConfig | EagleConfig] | None:
    """The folder and configuration of `--draft-model`; None if `--speculate` needs none.

    SetupError if it cannot draft for `target` with sequences of `max_model_len` tokens,
    FileNotFoundError if there is no such model.
    """
    if config.speculate not in WITH_MODEL:
        return None
    assert config.draft_model is not None
    named = f"--draft-model {config.draft_model}"
    try:
        folder = resolve_model(config.draft_model)
        if config.speculate == "eagle":
            return folder, read_eagle_config(folder, target)
        model = read_model_config(folder)
        pooling = read_pooling(folder, "auto")
    except SetupError as error:
        raise SetupError(f"{named}: {error}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{named}: {error}") from error
    if pooling is not None:
        raise SetupError(f"{named} pools and generates nothing; give a model that generates")
    if model.vocab_size != target.vocab_size:
        raise SetupError(
            f"{named} has {model.vocab_size} token ids and the model {target.vocab_size}; give a "
            "smaller model of the same series, which has the same tokenizer, or use --speculate "
            "suffix"
        )
    if model.max_position_embeddings < max_model_len:
        raise SetupError(
            f"{named} reads {model.max_position_embeddings} tokens, and sequences may have "
            f"{max_model_len}; set --max-model-len {model.max_position_embeddings} or less"
        )
    return folder, model


def load_draft_model(
    config: WorkerConfig,
    found: tuple[Path, ModelConfig | EagleConfig] | None,
    target: Decoder,
    max_model_len: int,
) -> Decoder | EagleHead | None:
    """The model of the result of `read_draft_model`, on the device and in the type of `target`."""
    if found is None:
        return None
    folder, model = found
    dummy, dtype = config.load_format == "dummy", target.weights.embedding.dtype
    if isinstance(model, EagleConfig):
        return load_eagle_head(None if dummy else folder, model, target, max_model_len, config.seed)
    device = target.weights.embedding.device
    if dummy:
        weights = served_weights(model, dummy_weights(model, dtype, device, config.seed))
    else:
        weights = load_weights(folder, model, dtype, device)
    tables = rope_tables(model, max_model_len, device)
    return Decoder(model, arranged_weights(weights, target.ops), target.ops, tables)


def draft_cost(
    target: Decoder, draft: Decoder | EagleHead, limits: Limits, dtype: torch.dtype
) -> float:
    """`Limits.draft_cost` of two models, measured with a pool of one block."""
    backend, drafter = EagerBackend(target, limits, dtype), drafter_of(draft, limits, dtype)
    slots, one = DeviceSlots(limits, torch.device("cpu")), np.ones(1, np.int32)
    of = torch.tensor([limits.padding_slot], dtype=torch.int32)

    def make_draft() -> None:
        # A head has its first draft, at place 0, from the step before.
        drafter.next_tokens(1, torch.zeros_like(of), of, one, one, False, slots)

    return measure_draft_cost(backend, make_draft, limits, backend.seconds_of)
