"""Reads and loads the draft model of `--speculate draft`, and times its steps."""

from pathlib import Path

import torch

from pagewire.config import WorkerConfig
from pagewire.models import resolve_model
from pagewire.worker.errors import SetupError
from pagewire.worker.measurement.draft_cost import measure_draft_cost
from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.pooling import read_pooling
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.startup.arranged_weights import arranged_weights


def read_draft_model(
    config: WorkerConfig, target: ModelConfig, max_model_len: int
) -> tuple[Path, ModelConfig] | None:
    """The folder and configuration of `--draft-model`; None without `--speculate draft`.

    SetupError if it cannot draft for `target` with sequences of `max_model_len` tokens,
    FileNotFoundError if there is no such model.
    """
    if config.speculate != "draft":
        return None
    assert config.draft_model is not None
    named = f"--draft-model {config.draft_model}"
    try:
        folder = resolve_model(config.draft_model)
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
    found: tuple[Path, ModelConfig] | None,
    ops: Ops,
    max_model_len: int,
    dtype: torch.dtype,
) -> Decoder | None:
    """The decoder of the result of `read_draft_model`, on the CPU and in the target's type."""
    if found is None:
        return None
    folder, model = found
    device = torch.device("cpu")
    if config.load_format == "dummy":
        weights = served_weights(model, dummy_weights(model, dtype, device, config.seed))
    else:
        weights = load_weights(folder, model, dtype, device)
    tables = rope_tables(model, max_model_len, device)
    return Decoder(model, arranged_weights(weights, ops), ops, tables)


def draft_cost(target: Decoder, draft: Decoder, limits: Limits, dtype: torch.dtype) -> float:
    """`Limits.draft_cost` of two decoders, measured with a pool of one block."""
    backend = EagerBackend(target, limits, dtype)
    other = EagerBackend(draft, limits, dtype)
    return measure_draft_cost(backend, other, limits, backend.seconds_of)
