"""The chat model that travels inside the package: a Hugging Face folder like any other."""

from pathlib import Path


def model_path() -> Path:
    """The folder of the embedded model: configuration, tokenizer, weights and model card.

    It is loaded through the same path as any Hugging Face folder.
    """
    return Path(__file__).parent / "model"
