"""Loads an EAGLE-3 head."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import fill_views, opened, weight_files
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.eagle.config import NUM_INPUTS, EagleConfig
from pagewire.worker.model.eagle.head import EagleHead, PairLayer
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weight_names import named_views
from pagewire.worker.model.weights import empty_weights

_EMBEDDING = "model.embed_tokens.weight"
_INTEGERS = ("I64", "I32")


def load_eagle_head(
    folder: Path | None,
    config: EagleConfig,
    target: Decoder,
    max_model_len: int,
    seed: int,
) -> EagleHead:
    """The head in `folder` for the model `target`, on the target's device and in its type.

    Without a folder, the weights are random and drafts are the first tokens. A checkpoint without
    embeddings uses those of the target.

    SetupError names a tensor that is missing, unknown, or of the wrong shape, type or value.
    """
    model, embedding = config.model, target.weights.embedding
    dtype, device, hidden = embedding.dtype, embedding.device, model.hidden_size
    weights = empty_weights(replace(model, vocab_size=1), dtype, device)
    own = folder is not None and _has_embedding(folder)
    layer = replace(
        weights.layers[0],
        input_norm=embedding.new_empty(2 * hidden),
        qkv=embedding.new_empty(model.qkv_size, 2 * hidden),
    )
    assert layer.input_norm is not None
    weights = replace(
        weights,
        embedding=torch.empty_like(embedding) if own else embedding,
        layers=(layer,),
        head=embedding.new_empty(model.vocab_size, hidden),
    )
    fusion = embedding.new_empty(hidden, NUM_INPUTS * hidden)
    token_norm, state_norm = layer.input_norm.split(hidden)
    views = named_views(model, weights) | {
        "model.layers.0.input_layernorm.weight": token_norm,
        "model.layers.0.hidden_norm.weight": state_norm,
        "fc.weight": fusion,
    }
    if not own:
        del views[_EMBEDDING]
    if folder is None:
        _randomize(views, model.initializer_range, seed)
        token_ids = torch.arange(model.vocab_size)
    else:
        fill_views(folder, model, views, dtype)
        token_ids = _token_ids(folder, model.vocab_size, len(embedding))
    served = served_weights(model, weights)
    same = torch.equal(token_ids, torch.arange(len(embedding)))
    tables = rope_tables(model, max_model_len, device)
    return EagleHead(
        decoder=Decoder(model, served, target.ops, tables, PairLayer(model, target.ops)),
        fusion=fusion,
        token_ids=None if same else token_ids.to(device),
        vocab_size=len(embedding),
        inputs=config.inputs,
        weight_bytes=served.nbytes + fusion.nbytes - (0 if own else embedding.nbytes),
    )


def _has_embedding(folder: Path) -> bool:
    """Whether the checkpoint has embeddings of its own."""
    for path in weight_files(folder):
        with opened(path) as file:
            if any(_EMBEDDING.endswith(name) for name in file.keys()):  # noqa: SIM118
                return True
    return False


def _token_ids(folder: Path, drafts: int, vocabulary: int) -> Tensor:
    """The token `[drafts]` of each draft; `d2t` has the differences."""
    own = torch.arange(drafts)
    for path in weight_files(folder):
        with opened(path) as file:
            if "d2t" not in file.keys():  # noqa: SIM118
                continue
            part = file.get_slice("d2t")
            if part.get_dtype() not in _INTEGERS or part.get_shape() != [drafts]:
                raise SetupError(
                    f"{path}: tensor d2t has shape {part.get_shape()} of {part.get_dtype()}; "
                    f"draft_vocab_size needs [{drafts}] of {' or '.join(_INTEGERS)}"
                )
            token_ids: Tensor = own + file.get_tensor("d2t")
            if token_ids.min() < 0 or token_ids.max() >= vocabulary:
                raise SetupError(f"{path}: d2t names tokens outside of 0 to {vocabulary - 1}")
            if len(token_ids.unique()) < drafts:
                raise SetupError(f"{path}: tensor d2t has two drafts for one token")
            return token_ids
    if drafts < vocabulary:
        raise SetupError(
            f"{folder}: tensor d2t [{drafts}] is missing, which says what tokens drafts are"
        )
    return own


def _randomize(views: dict[str, Tensor], deviation: float, seed: int) -> None:
    """Fills tensors as in an untrained model: norms are 1, all others normal."""
    device = next(iter(views.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in views.items():
        if "norm" in name:
            view.fill_(1.0)
        else:
            view.normal_(0.0, deviation, generator=generator)
