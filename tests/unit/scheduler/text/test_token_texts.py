"""The table of token texts."""

from pathlib import Path

import numpy as np

from pagewire.scheduler.text.token_texts import PARTIAL, TokenTexts
from pagewire.scheduler.text.tokenizer import Tokenizer
from support.models.tokenizer_folders import byte_level_folder


def test_a_byte_within_a_character_has_the_replacement_character(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(byte_level_folder(tmp_path))
    first, second = tokenizer.encode("ä", add_special_tokens=False)
    texts, sizes = tokenizer.token_texts.lookup(np.array([first, second], np.int32))
    assert texts == [b"", "\ufffd".encode()]
    assert sizes.tolist() == [PARTIAL, 3]


def test_partial_tokens_and_unknown_ids_have_no_text() -> None:
    texts = TokenTexts(["a", None, "äö"])
    found, sizes = texts.lookup(np.array([0, 1, 2, 3, 1000], np.int32))
    assert found == [b"a", b"", "äö".encode(), b"", b""]
    assert sizes.tolist() == [1, PARTIAL, 4, 0, 0]
