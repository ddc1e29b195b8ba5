"""Tokenizers without a tokenizer.json: transformers converts them once, in a process of its own.

    python -m pagewire.tokenizer_conversion FOLDER

prints the tokenizer.json of the SentencePiece model, tiktoken file or vocabulary in FOLDER. A
separate process releases its memory at the end; it must not import torch. The result is stored in a
cache, never in the model's folder.
"""

import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from pagewire.models import hub_cache

TOKENIZER = "tokenizer.json"
# Files that transformers can convert, without the files that describe them.
SOURCES = (
    "tokenizer.model",
    "tokenizer.model.v*",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_DESCRIPTIONS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Packages on which the result depends.
_PACKAGES = ("transformers", "tokenizers")
# Seconds. A vocabulary of 256,000 pieces takes about 30.
_TIMEOUT = 600.0
_MAX_REASON = 1000  # characters


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has a tokenizer.json, or a file that can be converted to one."""
    return any(any(folder.glob(pattern)) for pattern in (TOKENIZER, *SOURCES))


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json of `folder`, or the result of its conversion.

    FileNotFoundError if there is no tokenizer, ValueError if the conversion fails, OSError if its
    result cannot be stored.
    """
    if (folder / TOKENIZER).is_file():
        return folder / TOKENIZER
    text = converted_tokenizer(folder)
    name = _digest(folder, _sources(folder)) + ".json"
    for cache in _caches():
        if (cache / name).is_file() or _stored(text, cache / name):
            return cache / name
    raise OSError(f"no folder for the converted tokenizer can be written: {_caches()}; set HF_HOME")


def converted_tokenizer(folder: Path) -> str:
    """The text of a tokenizer.json for the tokenizer in `folder`, from the cache if possible.

    FileNotFoundError if there is no tokenizer, ValueError if transformers cannot convert it.
    """
    sources = _sources(folder)
    if not sources:
        raise FileNotFoundError(
            f"{folder} has no tokenizer: neither tokenizer.json nor one of {', '.join(SOURCES)}; "
            "give the folder or the id of a model that has it with --tokenizer, or serve token ids "
            "only with --skip-tokenizer"
        )
    name = _digest(folder, sources) + ".json"
    for cache in _caches():
        if (cache / name).is_file():
            return (cache / name).read_text(encoding="utf-8")
    text = _convert(folder)
    for cache in _caches():
        if _stored(text, cache / name):
            break
    return text


def _sources(folder: Path) -> list[Path]:
    return [path for pattern in SOURCES for path in sorted(folder.glob(pattern))]


def _convert(folder: Path) -> str:
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pagewire.tokenizer_conversion", str(folder)],
            capture_output=True,
            timeout=_TIMEOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"the tokenizer in {folder} was not converted within {_TIMEOUT:g} s; add a "
            "tokenizer.json to it, which transformers' save_pretrained makes"
        ) from error
    if ended.returncode != 0:
        # The line before the error may explain why transformers tried the step that failed.
        lines = ended.stderr.decode(errors="replace").strip().splitlines()[-2:]
        reason = "; ".join(lines)[:_MAX_REASON] or f"exit status {ended.returncode}"
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers cannot make one of what is there: "
            f"{reason}; give another tokenizer with --tokenizer"
        )
    return ended.stdout.decode()


def _digest(folder: Path, sources: list[Path]) -> str:
    digest = sha256(repr([version(package) for package in _PACKAGES]).encode())
    described = [folder / name for name in _DESCRIPTIONS if (folder / name).is_file()]
    for path in [*sources, *described]:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _caches() -> list[Path]:
    """Folders for results: beside the hub's cache, or this user's own if the former cannot be
    written."""
    temporary = Path(tempfile.gettempdir()) / f"pagewire-{os.getuid()}"
    folders = [hub_cache().parent / "pagewire"]
    try:
        temporary.mkdir(mode=0o700, exist_ok=True)
        status = temporary.lstat()
        # Another user could have made it, to inject a tokenizer.
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            folders.append(temporary)
    except OSError:
        pass
    return [folder / "tokenizers" for folder in folders]


def _stored(text: str, path: Path) -> bool:
    """Whether the text was written. Several processes may write the same file at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        return False
    return True


def main() -> None:
    """Converts the tokenizer of the folder that is the argument, and prints it."""
    # torch may be installed. Its import takes seconds, and the conversion does not need it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            sys.argv[1], local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        sys.exit(f"{type(tokenizer).__name__} has no form that the tokenizers library can run")
    sys.stdout.buffer.write(backend.to_str().encode())


if __name__ == "__main__":
    main()
