"""Tables of a tokenizer's vocabulary: the bytes that each token stands for."""

import json
from codecs import utf_8_decode
from typing import Any

from tokenizers import Tokenizer as Backend


def byte_level_table(
    backend: Backend, special_ids: frozenset[int]
) -> tuple[list[bytes], list[str | None]] | None:
    """Bytes and text by token id; None for a tokenizer that is not byte-level.

    The text holds where a character may begin; it is None if the token ends within a character.
    """
    spec = json.loads(backend.to_str())
    if not _is_byte_level(spec.get("decoder")):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    token_bytes = [b""] * size
    byte_of = _bytes_of_characters()
    for token, index in vocab.items():
        if index not in special_ids:
            token_bytes[index] = _token_bytes(token, byte_of)
    return token_bytes, [_whole_text(data) for data in token_bytes]


def byte_fallback_ids(backend: Backend) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>`, each one byte to a byte-fallback decoder."""
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(index for index in ids if index is not None)


def keeps_all_text(backend: Backend) -> bool:
    """Whether the tokens of a text stand for all of its normalized form."""
    if any(backend.token_to_id(character) is None for character in _bytes_of_characters()):
        return False  # bytes without a token are left out, or many become one
    spec = json.loads(backend.to_str())
    if spec.get("normalizer") not in (None, {"type": "NFC"}):
        return False
    step = spec.get("pre_tokenizer") or {"type": None}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    return all(
        each["type"] in ("ByteLevel", "Digits")
        or (each["type"] == "Split" and each.get("behavior") != "Removed")
        for each in steps
    )


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves and the others take code points from 256 up, in
    order: the mapping of GPT-2's byte-level BPE.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _whole_text(data: bytes) -> str | None:
    """The text of a token where a character may begin; None if it ends within one."""
    text, size = utf_8_decode(data, "replace", False)
    return text if size == len(data) else None
