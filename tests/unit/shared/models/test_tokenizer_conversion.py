"""Tokenizers without a tokenizer.json: ids and text are those of the original libraries."""

import json
import os
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tiktoken

from pagewire import tokenizer_conversion as conversion
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.tokenizer_conversion import converted_tokenizer, has_tokenizer, tokenizer_file
from support.models.tokenizer_folders import (
    byte_level_folder,
    sentencepiece_folder,
    tiktoken_folder,
    tiktoken_ranks,
)

TEXTS = [
    "The quick brown fox",
    "  two  spaces ",
    "Grüße aus München! 🙂👩‍👩‍👧",
    "a\nb\tc\n\n",
    "héllo ŵörld 你好",
    "1234 5",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache for all tests of this module."""
    folder = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HOME", str(folder))
    patch.delenv("HF_HUB_CACHE", raising=False)
    yield folder
    patch.undo()


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiktoken_folder(tmp_path_factory.mktemp("ranks"))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([detokenizer.feed(token) for token in ids]) + detokenizer.flush()


def test_a_sentencepiece_model_gives_its_own_ids_and_text(pieces: Path) -> None:
    tokenizer = Tokenizer(pieces)
    wanted = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert ids == [wanted.bos_id(), *wanted.encode(text)]
        assert tokenizer.decode(ids) == wanted.decode(ids) == text
        assert streamed(tokenizer, ids) == text
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.chat_template is not None
    assert tokenizer.token_bytes(wanted.piece_to_id("<0xF0>")) == b"\xf0"
    assert not (pieces / "tokenizer.json").exists()
    assert tokenizer_file(pieces).read_text() == converted_tokenizer(pieces)
    assert has_tokenizer(pieces)


def test_a_byte_that_is_no_character_is_replaced(pieces: Path) -> None:
    tokenizer = Tokenizer(pieces)
    wanted = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    ids = [*wanted.encode("a"), wanted.piece_to_id("<0xF0>"), *wanted.encode("b")]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert "\ufffd" in tokenizer.decode(ids)


def test_a_tiktoken_file_gives_its_own_ids_and_text(ranks: Path) -> None:
    tokenizer = Tokenizer(ranks)
    wanted = tiktoken.Encoding(
        "test",
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=tiktoken_ranks(),
        special_tokens={"<|end|>": 265},
    )
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        assert ids == wanted.encode(text)
        assert streamed(tokenizer, ids) == text
    assert tokenizer.encode("<|end|>", add_special_tokens=False).tolist() == [265]


def test_a_vocabulary_with_merges_gives_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    given = byte_level_folder(tmp_path / "given")
    model = json.loads((given / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    wanted, tokenizer = Tokenizer(given), Tokenizer(folder)
    for text in ("The quick brown fox", "Grüße"):
        ids = tokenizer.encode(text).tolist()
        assert ids == wanted.encode(text).tolist()
        assert streamed(tokenizer, ids) == text


def test_a_conversion_is_kept(
    ranks: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = converted_tokenizer(ranks)
    kept = list((cache / "pagewire" / "tokenizers").iterdir())
    assert text in [path.read_text() for path in kept]
    monkeypatch.setattr(conversion, "_convert", lambda folder: pytest.fail("converted again"))
    assert converted_tokenizer(ranks) == text
    other = tmp_path / "other"
    shutil.copytree(ranks, other)
    assert converted_tokenizer(other) == text  # the same files in another place
    (other / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(conversion, "_convert", lambda folder: "of other files")
    assert converted_tokenizer(other) == "of other files"


def test_a_cache_that_cannot_be_written_is_done_without(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(conversion.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(conversion, "_convert", lambda folder: "converted")
    assert converted_tokenizer(ranks) == "converted"
    private = tmp_path / f"pagewire-{os.getuid()}"
    assert private.stat().st_mode & 0o077 == 0
    assert [path.read_text() for path in (private / "tokenizers").iterdir()] == ["converted"]
    shutil.rmtree(private)
    private.mkdir(mode=0o777)
    private.chmod(0o777)  # writable for other users
    assert converted_tokenizer(ranks) == "converted"
    assert list(private.iterdir()) == []


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not has_tokenizer(tmp_path)
    for read in (Tokenizer, tokenizer_file):
        with pytest.raises(FileNotFoundError, match=r"neither tokenizer.json nor .*--tokenizer"):
            read(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e not a model \xff\xfe")
    with pytest.raises(ValueError, match=r"cannot make one of what is there: .*SentencePiece"):
        Tokenizer(tmp_path)


def test_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path)
    (folder / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["X"]}')
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}, "tokenizer_class": "X"}'
    )
    (folder / "tokenization_x.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass"
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        Tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_json_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_convert", lambda folder: pytest.fail("converted"))
    folder = byte_level_folder(tmp_path)
    assert Tokenizer(folder).encode("The").tolist()
    assert tokenizer_file(folder) == folder / "tokenizer.json"
    assert has_tokenizer(folder)
