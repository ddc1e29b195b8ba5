"""Stacks that embed or score, one for each module that needs it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.models.pooling_models import (
    VOCAB_WITH_TEXT,
    save_classifier,
    save_embedder,
    save_tokenizer,
)
from support.models.tiny_models import save_model
from support.processes.stack_process import RunningStack, running_stack

# Steps that cut most prompts into chunks.
SMALL_STEPS = ("--worker-max-num-batched-tokens", "24", "--torch-threads", "1")


@dataclass(frozen=True)
class PoolingStack:
    """A stack, and the same model in transformers."""

    stack: RunningStack
    model: Any
    folder: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def tokens(self, text: str, pair: str | None = None) -> list[int]:
        """The tokens of a text or a pair, with special tokens."""
        return self.tokenizer.encode(text, pair).ids


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingStack]:
    folder = tmp_path_factory.mktemp("embedder")
    model = save_embedder(folder)
    with running_stack(*SMALL_STEPS, model=folder) as stack:
        yield PoolingStack(stack, model, folder)


@pytest.fixture(scope="module")
def mean_embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingStack]:
    folder = tmp_path_factory.mktemp("mean-embedder")
    model = save_embedder(folder, "mean")
    with running_stack(*SMALL_STEPS, model=folder) as stack:
        yield PoolingStack(stack, model, folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingStack]:
    folder = tmp_path_factory.mktemp("classifier")
    model = save_classifier(folder, "qwen2", vocab_size=VOCAB_WITH_TEXT)
    save_tokenizer(folder)
    with running_stack(*SMALL_STEPS, model=folder) as stack:
        yield PoolingStack(stack, model, folder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingStack]:
    """A model that answers yes or no."""
    folder = tmp_path_factory.mktemp("reranker")
    model = save_model(folder, "qwen3", vocab_size=VOCAB_WITH_TEXT, initializer_range=0.1)
    save_tokenizer(folder)
    with running_stack(*SMALL_STEPS, "--task", "score", model=folder) as stack:
        yield PoolingStack(stack, model, folder)
