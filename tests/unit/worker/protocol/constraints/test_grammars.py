"""Which tokenizer the grammars of a model have, and which sequences share a lexer."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher

from pagewire.models import resolve_model
from pagewire.worker.protocol.constraints import grammars as module
from pagewire.worker.protocol.constraints.grammars import Grammars, grammars_of
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
    matcher, _ = grammars.matcher(LLMatcher.grammar_from_regex("the quick"), User())
    ids = grammars.tokenizer.tokenize_str("the quick")
    assert len(ids) < len("the quick")
    assert all(matcher.consume(token) for token in ids)
    assert matcher.current.is_accepting()


class User:
    """What runs a matcher."""


WORD = LLMatcher.grammar_from_regex("[a-z]+")


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr(module, "MAX_LEXERS", 2)
    monkeypatch.setattr(module, "QUICK_SECONDS", 60)
    found = grammars_of(resolve_model("embedded"), 4096)
    assert found is not None
    return found


def test_sequences_that_run_at_once_share_as_few_lexers_as_may_be(grammars: Grammars) -> None:
    first, second, third = User(), User(), User()
    _, one = grammars.matcher(WORD, first)
    _, two = grammars.matcher(WORD, second)
    assert one is not two
    assert grammars.matcher(WORD, third)[1] in (one, two)  # no more than MAX_LEXERS
    del second, third
    assert grammars.matcher(WORD, User())[1] is two


def test_a_lexer_without_a_user_serves_the_next_sequence(grammars: Grammars) -> None:
    assert grammars.matcher(WORD, User())[1] is grammars.matcher(WORD, User())[1]


def test_a_grammar_that_compiles_slowly_is_compiled_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUICK_SECONDS", 0)
    first, second = User(), User()
    assert grammars.matcher(WORD, first)[1] is grammars.matcher(WORD, second)[1]


def test_the_grammars_used_longest_ago_are_dropped(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    _, word = grammars.matcher(WORD, User())
    grammars.matcher(LLMatcher.grammar_from_regex("a"), User())
    assert grammars.matcher(WORD, User())[1] is word
    grammars.matcher(LLMatcher.grammar_from_regex("b"), User())
    assert grammars.matcher(WORD, User())[1] is word
    for letter in "cd":
        grammars.matcher(LLMatcher.grammar_from_regex(letter), User())
    assert grammars.matcher(WORD, User())[1] is not word
