"""The tokenizer of a model's grammars, and the grammars that are kept."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewire.models import resolve_model
from pagewire.worker.protocol.constraints import grammars as module
from pagewire.worker.protocol.constraints.grammars import GrammarError, Grammars, grammars_of
from support.models.tokenizer_folders import tiktoken_folder


def test_the_tokenizer_may_be_elsewhere_and_without_a_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's configuration still defines the end of a sequence."""
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
    assert all(matcher.consume(token) for token in ids)
    assert matcher.current.is_accepting()


WORD = LLMatcher.grammar_from_regex("[a-z]+")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled, in order; no more than two are kept."""
    calls = []
    compile_one = module.compile_grammar

    def noted(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        calls.append(grammar)
        return compile_one(tokenizer, grammar)

    monkeypatch.setattr(module, "compile_grammar", noted)
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    return calls


def test_a_grammar_is_compiled_once(compiled: list[str]) -> None:
    grammars = embedded_grammars()
    (letter,) = grammars.tokenizer.tokenize_str("q")
    first, second = grammars.matcher(WORD), grammars.matcher(WORD)
    assert compiled == [WORD]
    assert first.consume(letter)
    # Each matcher has its own state.
    assert first.current.is_accepting()
    assert not second.current.is_accepting()


def test_the_grammars_used_longest_ago_are_dropped(compiled: list[str]) -> None:
    grammars = embedded_grammars()
    a, b, c = (LLMatcher.grammar_from_regex(letter) for letter in "abc")
    for grammar in (WORD, a, WORD, b, WORD, c, a):
        grammars.matcher(grammar)
    assert compiled == [WORD, a, b, c, a]


def test_a_grammar_that_does_not_compile_is_refused_each_time(compiled: list[str]) -> None:
    grammars = embedded_grammars()
    for _ in range(2):
        with pytest.raises(GrammarError, match="look-around"):
            grammars.matcher(LLMatcher.grammar_from_regex("(?=a)"))
    assert len(compiled) == 1


def embedded_grammars() -> Grammars:
    found = grammars_of(resolve_model("embedded"), 4096)
    assert found is not None
    return found
