"""Decodes and encodes texts for programs that do not use token ids."""

from collections.abc import Sequence
from pathlib import Path

from pagewire.worker.errors import SetupError

# A tokenizer that decodes these to the same text can encode any text piece by piece.
_PROBES = (" a", "a", "\n\n  a ", "é🙂")


class ProgramText:
    """The model's tokenizer, for one program."""

    def __init__(self, folder: Path) -> None:
        """SetupError if the folder has no tokenizer, or if the package tokenizers is missing."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise SetupError(
                f"the program reads or writes text, and {folder} has no tokenizer.json; let it use "
                "token ids"
            )
        # Imported here, because programs with token ids do not need it.
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise SetupError(
                "the program reads or writes text, which needs the package tokenizers; install it"
            ) from error
        self._tokenizer = Tokenizer.from_file(str(path))
        # A program that writes the name of a special token means its letters.
        self._tokenizer.encode_special_tokens = True

    def check_pieces(self) -> None:
        """SetupError unless pieces of a text, encoded one by one, decode to the same text."""
        for probe in _PROBES:
            if self.encode(probe) is None:
                raise SetupError(
                    "the program writes text, and the model's tokenizer changes text that it gets "
                    "in pieces; only byte-level tokenizers do not. Let the program write token ids"
                )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, with the names of special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def encode(self, piece: str) -> list[int] | None:
        """The token ids of a piece of output; None if they do not decode to the piece."""
        if not piece:
            return []
        try:
            ids = list(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair
            return None
        return ids if self.decode(ids) == piece else None
