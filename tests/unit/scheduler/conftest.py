"""Tokenizers of the two kinds, made of a small corpus."""

import pytest

from pagewire.scheduler.text.tokenizer import Tokenizer
from support.models.tokenizer_folders import byte_fallback_folder, byte_level_folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level_folder(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_fallback_folder(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen
