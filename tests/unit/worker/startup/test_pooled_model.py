"""The configuration of a loaded model that pools."""

from dataclasses import replace

import pytest
import torch

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, parse_model_config
from pagewire.worker.model.pooling import PoolingConfig
from pagewire.worker.model.quantization.config import online_quantization
from pagewire.worker.model.weights import empty_weights
from pagewire.worker.startup.pooled_model import PoolingHead, pooled_model

EMBEDS = PoolingConfig("embed", "last", "normalize", max_length=77)
SCORES = PoolingConfig("score", "last", "sigmoid", head="tokens", true_token=9, false_token=4)


@pytest.fixture
def model() -> ModelConfig:
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": 512,
        }
    )


def test_embeddings_need_no_head_and_have_a_length_of_their_own(model: ModelConfig) -> None:
    loaded = pooled_model(model, EMBEDS, None)
    assert loaded == replace(model, tied_head=True, max_position_embeddings=77)
    assert pooled_model(model, EMBEDS, 77) == loaded
    with pytest.raises(SetupError, match=r"max_model_len 78: .* allows 1 to 77 \(max_seq_length\)"):
        pooled_model(model, EMBEDS, 78)


def test_scores_by_tokens_need_a_plain_head(model: ModelConfig) -> None:
    everything = replace(online_quantization("int8"), ignored=())
    quantized = replace(model, quantization=everything)
    weights = empty_weights(quantized, torch.float32, torch.device("cpu"))
    with pytest.raises(SetupError, match="lm_head of this llama model is quantized by online"):
        PoolingHead(SCORES, quantized, torch.device("cpu")).take(weights)
    online = replace(model, quantization=online_quantization("int8"))
    weights = empty_weights(online, torch.float32, torch.device("cpu"))
    _, head = PoolingHead(SCORES, online, torch.device("cpu")).take(weights)
    assert head is not None
    assert head.shape == (1, 8)


def test_scores_by_tokens_need_the_head(model: ModelConfig) -> None:
    assert pooled_model(model, SCORES, 900) == model
    with pytest.raises(SetupError, match="the token 10, outside the model's vocabulary of 10"):
        pooled_model(model, replace(SCORES, false_token=10), None)
