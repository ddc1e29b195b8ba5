"""Which tokenizer the grammars of a model have."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher

from pagewire.worker.protocol.constraints.grammars import grammars_of
from support.models.tokenizer_folders import tiktoken_folder


def test_the_tokenizer_may_be_elsewhere_and_without_a_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's configuration still says what ends a sequence."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    tokenizer = tiktoken_folder(tmp_path / "tokenizer")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 264}))
    assert grammars_of(model, 300) is None
    grammars = grammars_of(model, 300, tokenizer)
    assert grammars is not None
    assert grammars.tokenizer.eos_tokens == [264]
    matcher = grammars.matcher(LLMatcher.grammar_from_regex("the quick"))
    ids = grammars.tokenizer.tokenize_str("the quick")
    assert len(ids) < len("the quick")
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
