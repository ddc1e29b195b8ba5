"""The pooling of a model folder: the task, the pooled hidden states, and the score's head.

Two layouts are read: folders of sentence-transformers (`modules.json` and the folders in it), and
config.json of Hugging Face with a `*ForSequenceClassification` architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagewire.json_files import read_json, read_json_object
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.worker.errors import SetupError

Kind = Literal["last", "mean", "cls"]
Head = Literal["none", "classification", "tokens"]
Activation = Literal["none", "normalize", "sigmoid"]

MODULES = "modules.json"
POOLING_FILE = "config.json"
# The tokens whose logits a reranker of the Qwen3 kind compares.
YES, NO = "yes", "no"

# Modes of 1_Pooling/config.json: older files have a flag for each, newer files a name.
_FLAGS: Mapping[str, Kind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NAMES: Mapping[str, Kind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a prompt becomes one vector.

    `kind` selects hidden states: the last token's, the mean of all, or the first token's. A `head`
    maps the vector to one number: `classification` is the tensor score.weight of the checkpoint,
    `tokens` the difference of the language model head's rows for `true_token` and `false_token`
    (None for a zero row). `max_length` bounds a prompt; None: only the model does.
    """

    task: Literal["embed", "score"]
    kind: Kind
    activation: Activation
    head: Head = "none"
    true_token: int | None = None
    false_token: int | None = None
    max_length: int | None = None


def read_pooling(folder: Path, task: str, tokenizer: Path | None = None) -> PoolingConfig | None:
    """The pooling of a model for `--task`; None if it generates.

    With `auto`, a folder of sentence-transformers embeds, a sequence classifier scores, and any
    other model generates. `tokenizer` is the tokenizer's folder, if that is not the model's.
    SetupError names an unsupported value.
    """
    try:
        raw = read_json_object(folder / "config.json")
        modules = {} if task == "generate" else _modules(folder)
        chosen = _task(task, raw, modules)
        if chosen == "generate":
            return None
        _refuse_unsupported(raw, folder)
        bound = _max_length(folder)
        if chosen == "embed":
            return _embedding(folder, modules, bound)
        if _classifies(raw):
            return _classifier(raw, folder, bound)
        return _token_scorer(folder, modules, bound, tokenizer or folder)
    except SetupError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise SetupError(f"{folder}: its pooling cannot be read: {what}") from error


def _task(task: str, raw: Mapping[str, Any], modules: Mapping[str, str]) -> str:
    architectures = raw.get("architectures") or []
    headless = any(name.endswith("Model") for name in architectures)
    if task == "auto":
        if "LogitScore" in modules:
            raise SetupError(
                "modules.json: a LogitScore module may need a template of its own for pairs; start "
                "with --task score to use the format of Qwen3's rerankers"
            )
        if _classifies(raw):
            return "score"
        return "embed" if modules or headless else "generate"
    if _classifies(raw) and task != "score":
        raise SetupError(
            f"--task {task}: config.json names {', '.join(architectures)}, which has a "
            "classification head; use --task score"
        )
    if headless and task in ("generate", "score"):
        raise SetupError(
            f"--task {task}: config.json names {', '.join(architectures)}, which has no head; use "
            "--task embed"
        )
    return task


def _classifies(raw: Mapping[str, Any]) -> bool:
    architectures = raw.get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def _refuse_unsupported(raw: Mapping[str, Any], folder: Path) -> None:
    for key, needed in (("is_causal", True), ("use_bidirectional_attention", False)):
        if raw.get(key) not in (None, needed):
            raise SetupError(
                f"config.json: {key} is {raw[key]!r}; only models with causal attention are "
                "supported"
            )
    path = folder / "config_sentence_transformers.json"
    config = read_json_object(path) if path.is_file() else {}
    if (name := config.get("default_prompt_name")) is not None:
        raise SetupError(
            f"{path.name}: default_prompt_name is {name!r}, and no prompt is added here; set it to "
            "null, and let clients send the prompt with their input"
        )


def _modules(folder: Path) -> dict[str, str]:
    """The modules of sentence-transformers: the folder of each by its class, in order."""
    path = folder / MODULES
    if not path.is_file():
        return {}
    modules = {}
    for module in read_json(path):
        name = module["type"].rpartition(".")[2]
        if name not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise SetupError(
                f"{MODULES}: a module of the type {module['type']}; supported are Transformer, "
                "Pooling, Normalize and LogitScore"
            )
        modules[name] = module["path"]
    if modules.get("Transformer") != "":
        raise SetupError(
            f"{MODULES}: the module Transformer must be in the model's own folder (path '')"
        )
    return modules


def _max_length(folder: Path) -> int | None:
    """The longest prompt in sentence_bert_config.json, which old and new folders have."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None
    raw = read_json_object(path)
    if raw.get("do_lower_case"):
        raise SetupError(
            f"{path.name}: do_lower_case is true; use a tokenizer that lowers the case"
        )
    length = raw.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise SetupError(f"{path.name}: max_seq_length is {length!r}; it must be a number above 0")
    return length


def _embedding(folder: Path, modules: Mapping[str, str], bound: int | None) -> PoolingConfig:
    if not modules:  # as in vLLM: Qwen3-Embedding's pooling
        return PoolingConfig("embed", "last", "normalize", max_length=bound)
    if "LogitScore" in modules:
        raise SetupError(f"{MODULES}: a module LogitScore gives scores; use --task score")
    if "Pooling" not in modules:
        raise SetupError(f"{MODULES}: there is no module Pooling; use --task score or generate")
    kind = _kind(folder / modules["Pooling"] / POOLING_FILE)
    activation: Activation = "normalize" if "Normalize" in modules else "none"
    return PoolingConfig("embed", kind, activation, max_length=bound)


def _kind(path: Path) -> Kind:
    raw = read_json_object(path)
    place = f"{path.parent.name}/{path.name}"
    if "pooling_mode" in raw:
        given = raw["pooling_mode"]
        names = [given] if isinstance(given, str) else list(given)
        found = [_NAMES.get(name) for name in names]
    else:
        names = [k for k, v in raw.items() if k.startswith("pooling_mode_") and v is True]
        found = [_FLAGS.get(name) for name in names]
    if len(found) != 1 or found[0] is None:
        raise SetupError(
            f"{place}: the pooling is {', '.join(names) or 'none'}; exactly one of lasttoken, mean "
            "and cls is supported"
        )
    return found[0]


def _classifier(raw: Mapping[str, Any], folder: Path, bound: int | None) -> PoolingConfig:
    labels = len(raw["id2label"]) if raw.get("id2label") else raw.get("num_labels", 2)
    if labels != 1:
        raise SetupError(
            f"config.json: the classification head has {labels} labels (num_labels, or 2 without "
            "it); scores need a model with one"
        )
    return PoolingConfig(
        "score", "last", _score_activation(raw, folder), head="classification", max_length=bound
    )


def _score_activation(raw: Mapping[str, Any], folder: Path) -> Activation:
    """The activation of a score: a sigmoid unless the model names another.

    The rule is that of sentence-transformers' cross-encoders.
    """
    path = folder / "config_sentence_transformers.json"
    config = read_json_object(path) if path.is_file() else {}
    older = raw.get("sentence_transformers") or {}
    name = config.get("activation_fn") or older.get("activation_fn") or "Sigmoid"
    activation = _ACTIVATIONS.get(str(name).rpartition(".")[2])
    if activation is None:
        raise SetupError(f"activation_fn is {name!r}; supported are Identity and Sigmoid")
    return activation


def _token_scorer(
    folder: Path, modules: Mapping[str, str], bound: int | None, tokenizer: Path
) -> PoolingConfig:
    if "Pooling" in modules:
        raise SetupError(f"{MODULES}: a module Pooling gives embeddings; use --task embed")
    if "LogitScore" in modules:
        raw = read_json_object(folder / modules["LogitScore"] / POOLING_FILE)
        true, false = int(raw["true_token_id"]), raw.get("false_token_id")
    else:
        true, false = _single_token(tokenizer, YES), _single_token(tokenizer, NO)
    config = read_json_object(folder / "config.json")
    return PoolingConfig(
        "score",
        "last",
        _score_activation(config, folder),
        head="tokens",
        true_token=true,
        false_token=false,
        max_length=bound,
    )


def _single_token(folder: Path, word: str) -> int:
    """The id of a word that is one token."""
    path = tokenizer_file(folder)
    vocabulary = read_json_object(path)["model"]["vocab"]
    found = vocabulary.get(word) if isinstance(vocabulary, dict) else None
    if found is None:
        raise SetupError(
            f"--task score: {path} has no token {word!r}, so this model is not a reranker of the "
            "Qwen3 kind; serve one, or a model with a classification head"
        )
    return int(found)
