"""Tiny random models that embed or score, and the expected results."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from support.models.tiny_models import _SIZES, VARIANTS, save_model
from support.models.tokenizer_folders import CORPUS

VOCAB_WITH_TEXT = 512  # more than the tokenizer has
_MODULE = "sentence_transformers.models"


def add_modules(folder: Path, pooling: dict[str, Any] | None, *, normalize: bool) -> None:
    """Writes what sentence-transformers stores beside a model; no pooling for a cross-encoder."""
    names = ["Transformer"]
    if pooling is not None:
        names.append("Pooling")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if normalize:
        names.append("Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{name}",
            "type": f"{_MODULE}.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def save_classifier(folder: Path, variant: str, *, labels: int = 1, **overrides: Any) -> Any:
    """Makes a sequence classifier of `VARIANTS` in float32, saves it, and returns it."""
    model_type, differences = VARIANTS[variant]
    sizes = {**_SIZES, **differences, **overrides}
    # transformers uses the last token that is not padding; no prompt ends with the padding token.
    padding = sizes["vocab_size"] - 1
    config = AutoConfig.for_model(model_type, **sizes, num_labels=labels, pad_token_id=padding)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def save_headless(folder: Path, causal: PreTrainedModel) -> None:
    """Saves only the decoder of a causal model: its tensors have shorter names."""
    causal.model.save_pretrained(folder)


def hidden_states(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The last hidden states `[tokens, hidden]` in transformers."""
    with torch.no_grad():
        return model.model(torch.tensor([tokens])).last_hidden_state[0]


def pooled(model: PreTrainedModel, tokens: list[int], kind: str) -> torch.Tensor:
    """The vector `[hidden]` of a prompt, before it is normalized."""
    states = hidden_states(model, tokens)
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]


def embedding(
    model: PreTrainedModel, tokens: list[int], kind: str, dimensions: int | None = None
) -> list[float]:
    """The embedding, cut and then normalized."""
    vector = pooled(model, tokens, kind)[:dimensions]
    return (vector / vector.norm()).tolist()


def classified(model: Any, tokens: list[int]) -> float:
    """The logit of a classifier with one label."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, 0].item()


def yes_probability(model: PreTrainedModel, tokens: list[int], yes: int, no: int) -> float:
    """The probability of "yes" against "no" as the next token."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    return logits[[no, yes]].softmax(0)[1].item()


def save_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer with the tokens "yes" and "no"; each text ends with `<|end|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes", "no"] * 50 + CORPUS, trainer)
    end = ("<|end|>", tokenizer.token_to_id("<|end|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B <|end|>", special_tokens=[end]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def load_headless(folder: Path) -> PreTrainedModel:
    """The decoder that `save_headless` stored."""
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def save_embedder(folder: Path, pooling_mode: str = "lasttoken") -> PreTrainedModel:
    """A folder of sentence-transformers with a tokenizer; returns the model."""
    model = save_model(folder, "qwen3-tied", vocab_size=VOCAB_WITH_TEXT)
    save_tokenizer(folder)
    add_modules(folder, {"pooling_mode": pooling_mode}, normalize=True)
    return model
