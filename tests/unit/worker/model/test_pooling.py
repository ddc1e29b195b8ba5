"""Pooling in a model folder, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import parse_model_config
from pagewire.worker.model.pooling import PoolingConfig, read_pooling

TRANSFORMER = ("", "sentence_transformers.models.Transformer")
POOLING = ("1_Pooling", "sentence_transformers.models.Pooling")
NORMALIZE = ("2_Normalize", "sentence_transformers.models.Normalize")
# The names of the classes moved in a later version.
NEW_POOLING = ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling")
LOGIT_SCORE = ("1_LogitScore", "sentence_transformers.cross_encoder.modules.LogitScore")
CAUSAL = {"architectures": ["Qwen3ForCausalLM"]}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
HEADLESS = {"architectures": ["Qwen3Model"]}


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def model(folder: Path, config: dict[str, Any], *modules: tuple[str, str]) -> Path:
    write(folder, "config.json", config)
    if modules:
        named = [
            {"idx": i, "name": str(i), "path": path, "type": kind}
            for i, (path, kind) in enumerate(modules)
        ]
        write(folder, "modules.json", named)
    return folder


@pytest.mark.parametrize("task", ["auto", "generate"])
def test_a_causal_model_generates(tmp_path: Path, task: str) -> None:
    assert read_pooling(model(tmp_path, CAUSAL), task) is None


def test_a_model_with_other_modules_may_generate(tmp_path: Path) -> None:
    dense = ("2_Dense", "sentence_transformers.models.Dense")
    assert read_pooling(model(tmp_path, CAUSAL, TRANSFORMER, dense), "generate") is None


@pytest.mark.parametrize("config", [CAUSAL, HEADLESS])
def test_without_modules_the_last_token_is_normalized(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    found = read_pooling(model(tmp_path, config), "embed")
    assert found == PoolingConfig("embed", "last", "normalize")


def test_a_model_without_a_head_embeds(tmp_path: Path) -> None:
    found = read_pooling(model(tmp_path, HEADLESS), "auto")
    assert found == PoolingConfig("embed", "last", "normalize")


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
@pytest.mark.parametrize("task", ["auto", "embed"])
def test_modules_say_how_to_pool(
    tmp_path: Path, task: str, pooling: dict[str, Any], kind: Any
) -> None:
    folder = model(tmp_path, CAUSAL, TRANSFORMER, NEW_POOLING)
    write(folder, "1_Pooling/config.json", pooling)
    assert read_pooling(folder, task) == PoolingConfig("embed", kind, "none")
    model(tmp_path, CAUSAL, TRANSFORMER, POOLING, NORMALIZE)
    write(folder, "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": False})
    expected = PoolingConfig("embed", kind, "normalize", max_length=77)
    assert read_pooling(folder, task) == expected


@pytest.mark.parametrize("task", ["auto", "score"])
def test_a_classifier_scores(tmp_path: Path, task: str) -> None:
    folder = model(tmp_path, CLASSIFIER, TRANSFORMER)
    expected = PoolingConfig("score", "last", "sigmoid", head="classification")
    assert read_pooling(folder, task) == expected
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write(folder, "config.json", CLASSIFIER | {"sentence_transformers": identity})
    expected = PoolingConfig("score", "last", "none", head="classification")
    assert read_pooling(folder, task) == expected


def test_yes_and_no_score(tmp_path: Path) -> None:
    folder = model(tmp_path, CAUSAL)
    write(folder, "tokenizer.json", {"model": {"vocab": {"no": 4, "yes": 9}}})
    found = read_pooling(folder, "score")
    assert found is not None
    assert (found.head, found.true_token, found.false_token) == ("tokens", 9, 4)
    other = tmp_path / "other"
    write(other, "tokenizer.json", {"model": {"vocab": {"no": 1, "yes": 2}}})
    found = read_pooling(folder, "score", other)
    assert found is not None
    assert (found.true_token, found.false_token) == (2, 1)


def test_the_tokens_of_a_logit_score_module(tmp_path: Path) -> None:
    folder = model(tmp_path, CAUSAL, TRANSFORMER, LOGIT_SCORE)
    write(folder, "1_LogitScore/config.json", {"true_token_id": 7, "false_token_id": None})
    found = read_pooling(folder, "score")
    assert found is not None
    assert (found.head, found.true_token, found.false_token) == ("tokens", 7, None)


@pytest.mark.parametrize(
    ("task", "config", "modules", "files", "message"),
    [
        ("auto", CAUSAL, [TRANSFORMER, LOGIT_SCORE], {}, "start with --task score"),
        ("generate", CLASSIFIER, [], {}, "has a classification head; use --task score"),
        ("embed", CLASSIFIER, [], {}, "has a classification head; use --task score"),
        ("generate", HEADLESS, [], {}, "has no head; use --task embed"),
        ("score", HEADLESS, [], {}, "has no head; use --task embed"),
        ("auto", CLASSIFIER | {"id2label": {"0": "a", "1": "b"}}, [], {}, "has 2 labels"),
        ("auto", {"architectures": CLASSIFIER["architectures"]}, [], {}, "has 2 labels"),
        ("embed", CAUSAL | {"is_causal": False}, [], {}, "is_causal is False"),
        (
            "embed",
            CAUSAL | {"use_bidirectional_attention": True},
            [],
            {},
            "use_bidirectional_attention is True",
        ),
        (
            "auto",
            CAUSAL,
            [TRANSFORMER, ("2_Dense", "sentence_transformers.models.Dense")],
            {},
            "a module of the type sentence_transformers.models.Dense",
        ),
        ("auto", CAUSAL, [("0_Transformer", TRANSFORMER[1]), POOLING], {}, "own folder"),
        ("embed", CAUSAL, [TRANSFORMER, LOGIT_SCORE], {}, "use --task score"),
        ("embed", CAUSAL, [TRANSFORMER], {}, "no module Pooling"),
        ("score", CAUSAL, [TRANSFORMER, POOLING], {}, "use --task embed"),
        (
            "auto",
            CAUSAL,
            [TRANSFORMER, POOLING],
            {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            "the pooling is pooling_mode_max_tokens",
        ),
        (
            "auto",
            CAUSAL,
            [TRANSFORMER, POOLING],
            {
                "1_Pooling/config.json": {
                    "pooling_mode_mean_tokens": True,
                    "pooling_mode_cls_token": True,
                }
            },
            "exactly one of lasttoken, mean and cls",
        ),
        ("auto", CAUSAL, [TRANSFORMER, POOLING], {}, "its pooling cannot be read"),
        (
            "score",
            CAUSAL,
            [TRANSFORMER, LOGIT_SCORE],
            {"1_LogitScore/config.json": {}},
            "the key 'true_token_id' is missing",
        ),
        (
            "auto",
            CAUSAL,
            [TRANSFORMER, POOLING],
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            "default_prompt_name is 'query'",
        ),
        (
            "embed",
            CAUSAL,
            [],
            {"sentence_bert_config.json": {"do_lower_case": True}},
            "do_lower_case is true",
        ),
        (
            "embed",
            CAUSAL,
            [],
            {"sentence_bert_config.json": {"max_seq_length": 0}},
            "max_seq_length is 0",
        ),
        (
            "auto",
            CLASSIFIER,
            [],
            {"config_sentence_transformers.json": {"activation_fn": "torch.nn.Tanh"}},
            "activation_fn is 'torch.nn.Tanh'",
        ),
        (
            "score",
            CAUSAL,
            [],
            {"tokenizer.json": {"model": {"vocab": {"yes": 1}}}},
            "has no token 'no'",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path,
    task: str,
    config: dict[str, Any],
    modules: list[tuple[str, str]],
    files: dict[str, Any],
    message: str,
) -> None:
    folder = model(tmp_path, config, *modules)
    for name, content in files.items():
        write(folder, name, content)
    with pytest.raises(SetupError, match=message):
        read_pooling(folder, task)


def test_the_family_of_a_model_without_a_head() -> None:
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8,
    }
    for name in ("Qwen2Model", "Qwen2ForSequenceClassification"):
        assert parse_model_config({**sizes, "architectures": [name]}).family == "qwen2"
    with pytest.raises(SetupError, match="BertModel is not a supported architecture"):
        parse_model_config({**sizes, "architectures": ["BertModel"]})
