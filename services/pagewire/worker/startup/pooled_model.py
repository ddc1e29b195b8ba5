"""A model that pools: its decoder has no language model head, and a score has a head of its own."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.pooling import PoolingConfig
from pagewire.worker.model.weights import Weights


def pooled_model(
    model: ModelConfig, pooling: PoolingConfig, max_model_len: int | None
) -> ModelConfig:
    """The configuration to load: without a head that is not used, and with the pooling's length.

    Rotary embedding does not depend on the length, which only bounds prompts. SetupError if
    `max_model_len`, the setting, exceeds it, or for tokens outside the vocabulary.
    """
    bound = pooling.max_length
    if bound is not None and max_model_len is not None and max_model_len > bound:
        raise SetupError(
            f"max_model_len {max_model_len}: sentence_bert_config.json allows 1 to {bound} "
            "(max_seq_length)"
        )
    if pooling.head != "tokens":
        # Then lm_head.weight is not read, and the last norm does not include a factor of logits.
        model = replace(model, tied_head=True, logit_multiplier=1.0)
    elif model.logit_soft_cap is not None:
        raise SetupError(
            f"--task score: config.json: final_logit_softcapping is {model.logit_soft_cap}; the "
            "score by two tokens needs logits without a cap"
        )
    longest = min(model.max_position_embeddings, bound or model.max_position_embeddings)
    for token in (pooling.true_token, pooling.false_token):
        if token is not None and not 0 <= token < model.vocab_size:
            raise SetupError(
                f"the score compares the token {token}, outside the model's vocabulary of "
                f"{model.vocab_size} ids"
            )
    return replace(model, max_position_embeddings=longest)


class PoolingHead:
    """The head `[1, hidden]` float32 of a score, while the weights are loaded."""

    def __init__(
        self, pooling: PoolingConfig | None, model: ModelConfig, device: torch.device
    ) -> None:
        self._pooling = pooling
        self._family = model.family
        self._method = None if model.quantization is None else model.quantization.method
        self._classifier: Tensor | None = None
        if pooling is not None and pooling.head == "classification":
            self._classifier = torch.empty((1, model.hidden_size), device=device)

    def tensors(self) -> Mapping[str, Tensor]:
        """The head's tensors in the checkpoint, by name."""
        return {} if self._classifier is None else {"score.weight": self._classifier}

    def randomize(self, seed: int) -> None:
        """Sets random values, for dummy weights."""
        if self._classifier is not None:
            generator = torch.Generator(self._classifier.device).manual_seed(seed)
            self._classifier.normal_(generator=generator)

    def take(self, weights: Weights) -> tuple[Weights, Tensor | None]:
        """The decoder's weights and the head; None for a model without one.

        The sigmoid of the difference of two logits is the softmax of both, so the head of a score
        by two tokens is the difference of their rows. The other rows are dropped.
        """
        if self._pooling is None or self._pooling.head != "tokens":
            return weights, self._classifier
        rows = weights.head
        if not isinstance(rows, Tensor):
            raise SetupError(
                f"--task score: lm_head of this {self._family} model is quantized by "
                f"{self._method}, and the score by two tokens needs plain rows; use weights in "
                "which lm_head is not quantized"
            )
        assert self._pooling.true_token is not None
        head = rows[self._pooling.true_token].float()
        if self._pooling.false_token is not None:
            head = head - rows[self._pooling.false_token].float()
        return replace(weights, head=weights.embedding), head[None].clone()
