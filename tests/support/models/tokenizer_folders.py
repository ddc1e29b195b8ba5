"""Makes model folders that hold only a small tokenizer."""

import base64
import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you.",
    "Grüße aus München! Ça va? Привет, мир. こんにちは世界。 你好，世界。 🙂🚀👩‍👩‍👧 naïve café",
    "def main() -> None:\n    return 1 + 2\n\n\tprint('x')  # done",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level_folder(folder: Path) -> Path:
    """Byte-level BPE as in Llama 3 and Qwen; `<|end|>` ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "naïveté"])
    return _save(tokenizer, folder, tokenizer.token_to_id("<|end|>"))


def partial_byte_level_folder(folder: Path, unknown: str | None) -> Path:
    """Byte-level BPE without tokens for most bytes; `unknown` replaces them, if given."""
    names = ["a", "b", *([] if unknown is None else [unknown])]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=unknown, fuse_unk=unknown is not None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder, 0)


def byte_fallback_folder(folder: Path) -> Path:
    """SentencePiece-like BPE with byte fallback, as in Llama 2 and Mistral."""
    words = ["▁The", "▁quick", "fox", "▁", "a", "b", "e", "h", "▁hello", "ü"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _save(tokenizer, folder, 2)


def sentencepiece_folder(folder: Path, kind: str = "bpe") -> Path:
    """A SentencePiece model with byte fallback, `bpe` or `unigram`, and no tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=350,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    config = {"model_type": "llama", "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special |= {"chat_template": CHAT_TEMPLATE, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def tiktoken_ranks() -> dict[bytes, int]:
    """A byte-level vocabulary for tiktoken, in which longer tokens have later ranks."""
    words = (b"th", b"he", b"the", b" the", b"qu", b"ui", b"qui", b"ck", "ü".encode())
    return {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *words])}


def tiktoken_folder(folder: Path) -> Path:
    """A tiktoken file as in Llama 3's original format, and no tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = tiktoken_ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 265}))
    added = {str(len(ranks)): {"content": "<|end|>", "special": True}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _save(tokenizer: Tokenizer, folder: Path, eos: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder
