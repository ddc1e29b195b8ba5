"""The tokenizer: token ids of texts, bounds on their number, bytes of tokens."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import RequestError
from pagewire.sampling import SamplingParams
from pagewire.scheduler.text.tokenizer import (
    TokenIdsOnly,
    Tokenizer,
    TooManyTokensError,
)
from pagewire.v1 import inference_pb2 as pb
from support.models.tokenizer_folders import (
    CORPUS,
    byte_level_folder,
    partial_byte_level_folder,
)


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.7, "top_k": null, "repetition_penalty": 1.05, "no_repeat_ngram_size": 3}'
    )
    defaults = Tokenizer(folder).default_sampling
    assert defaults == SamplingParams(temperature=0.7, repetition_penalty=1.05)
    given = pb.SamplingParams(temperature=0, top_p=0.5, repetition_penalty=1, logit_bias={3: 2})
    resolved = SamplingParams(temperature=0, top_p=0.5, logit_bias={3: 2})
    assert SamplingParams.from_proto(given, defaults) == resolved
    assert SamplingParams.from_proto(pb.SamplingParams(), defaults).temperature == 0.7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", '"hot"'),
        ("top_k", "true"),
        ("eos_token_id", '"2"'),
        ("eos_token_id", "[{}]"),
        ("eos_token_id", "[2, -1]"),
        ("eos_token_id", "2147483648"),
        ("top_k", "5.0"),
        ("top_k", "-1"),
        ("temperature", "NaN"),
    ],
)
def test_wrong_values_in_generation_config_are_named(tmp_path: Path, key: str, value: str) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "generation_config.json").write_text(f'{{"{key}": {value}}}')
    with pytest.raises(ValueError, match=rf"generation_config\.json: {key} is .*; it must be"):
        Tokenizer(folder)


def test_bytes_of_tokens_are_those_of_the_text(byte_level: Tokenizer) -> None:
    for text in CORPUS:
        data = [byte_level.token_bytes(token) for token in byte_level.encode(text).tolist()]
        assert b"".join(data) == text.encode()
        assert all(data)


def test_bytes_of_single_tokens(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    (end,) = byte_level.encode("<|end|>").tolist()
    assert byte_level.token_bytes(end) == b"<|end|>", "a special token, which has no text"
    assert byte_level.token_bytes(10**6) == b""
    ids = {name: byte_fallback._backend.token_to_id(name) for name in ("▁The", "fox", "▁", "</s>")}
    data = [byte_fallback.token_bytes(token) for token in ids.values()]
    assert data == [b" The", b"fox", b" ", b"</s>"]
    assert (
        b"".join(map(byte_fallback.token_bytes, byte_fallback.encode("é").tolist()))
        == " é".encode()
    )


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["a", "ab ", "hello", " ", "\n", "é", "e\u0301", "🙂", "<|end|>", "<|end", "0", "?!"]
        ),
        max_size=400,
    ).map("".join),
    times=st.sampled_from([1, 1, 40]),
    limit=st.integers(1, 60),
)
def test_a_text_is_refused_for_its_tokens_only_if_it_has_too_many(
    tokenizer: Tokenizer, text: str, times: int, limit: int
) -> None:
    """Bounds that are computed from the beginning of a text must hold for the whole text."""
    text *= times
    ids = tokenizer.encode(text)
    if len(ids) <= limit:
        assert tokenizer.encode(text, limit=limit).tolist() == ids.tolist()
    else:
        with pytest.raises(TooManyTokensError):
            tokenizer.encode(text, limit=limit)


@pytest.mark.parametrize("unknown", [None, "<unk>"], ids=["left out", "one for all"])
def test_bytes_without_a_token_are_not_counted(tmp_path: Path, unknown: str | None) -> None:
    folder = partial_byte_level_folder(tmp_path, unknown)
    for text in ("ab" + "~" * 10_000, "~" * 5_000 + "ab"):
        ids = Tokenizer(folder).encode(text).tolist()
        assert len(ids) <= 3
        assert Tokenizer(folder).encode(text, limit=3).tolist() == ids


@pytest.mark.parametrize("piece", ["a", "ab ", "🙂", "hello world\n"])
def test_too_many_tokens_are_proved_from_the_beginning(
    byte_level: Tokenizer, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of millions of characters is not encoded as a whole."""
    encoded: list[int] = []
    backend = byte_level._backend

    class Counting:
        normalizer = None

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            encoded.append(len(text))
            return backend.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(byte_level, "_backend", Counting())
    with pytest.raises(TooManyTokensError):
        byte_level.encode(piece * (1_000_000 // len(piece)), limit=500)
    assert sum(encoded) < 10_000


def test_eos_comes_from_the_model_folder(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_ids == (byte_level.encode("<|end|>").tolist()[0],)


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    ids_only = TokenIdsOnly(tmp_path)
    assert ids_only.eos_token_ids == (7, 8)
    for refused in (
        ids_only.detokenizer,
        lambda: ids_only.encode("a"),
        lambda: ids_only.decode([1]),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            refused()
