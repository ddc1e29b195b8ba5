"""Trains a byte-level BPE tokenizer on the text files of some folders.

For measurements whose cost depends on a vocabulary, if no published tokenizer is available. Texts
are split as by the tokenizers of Qwen 2 and 3: each digit is a token, and a word has at most one
other character before it. `--split gpt2` allows tokens of several digits.

    python benchmarks/train_tokenizer.py --entries 151643 --output DIR FOLDER...
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Contractions, words, digits, punctuation, and white space, as published with Qwen's tokenizers.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIXES = {".py", ".md", ".rst", ".txt", ".json", ".c", ".h"}


def texts(folders: list[Path], limit: int) -> Iterator[str]:
    """The files in a fixed order, up to `limit` bytes together."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size < 1 << 20:
                text = path.read_text(errors="ignore")
                limit -= len(text)
                if limit < 0:
                    return
                yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--entries", type=int, required=True)
    parser.add_argument("--megabytes", type=int, default=100, help="of text, at most")
    parser.add_argument("--output", type=Path, required=True, help="folder for tokenizer.json")
    parser.add_argument("--split", choices=["qwen", "gpt2"], default="qwen", help="of texts")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if args.split == "qwen":
        parts = pre_tokenizers.Split(Regex(QWEN), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.entries,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(args.folders, args.megabytes << 20), trainer)
    print(f"{tokenizer.get_vocab_size()} entries")
    tokenizer.save(str(args.output / "tokenizer.json"))


if __name__ == "__main__":
    main()
