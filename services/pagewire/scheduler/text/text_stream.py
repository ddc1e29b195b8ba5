"""The text of one running sequence: incremental decoding and stop strings."""

from pagewire.scheduler.text.detokenizer import Detokenizer


class TextStream:
    """Turns tokens into text that may be sent, and finds stop strings.

    Text that may be the beginning of a stop string is held back. The text that was returned is a
    pure function of the tokens that were fed, so a resumed sequence that is fed the same tokens
    continues at the same place. A stop string that the first `min_tokens` tokens complete is text.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_num_tokens",
        "_stop",
        "stop_string",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        include_stop: bool,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0  # counted if there are stop strings
        self._held = ""
        self.stop_string: str | None = None

    @property
    def by_table(self) -> bool:
        """Whether the next token may take its text from TokenTexts, if it has one there.

        Such a token need not be fed, because it changes no state.
        """
        return not self._stop and self._detokenizer.at_character

    def feed(self, token: int) -> str:
        """The text that may be sent after this token; sets `stop_string` when one is complete."""
        piece = self._detokenizer.feed(token)
        if not self._stop:
            return piece
        self._num_tokens += 1
        return self._release(piece) if piece else piece

    def flush(self) -> str:
        """The rest of the text when generation ends; empty after a stop string."""
        if self.stop_string is not None:
            return ""
        rest = self._detokenizer.flush()
        if self._stop:
            rest = self._release(rest)
            if self.stop_string is None:
                rest, self._held = rest + self._held, ""
        return rest

    def _release(self, piece: str) -> str:
        text = self._held + piece
        if self._num_tokens > self._min_tokens and (found := self._found(text, len(self._held))):
            at, self.stop_string = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[: at + len(self.stop_string)] if self._include_stop else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _found(self, text: str, old: int) -> list[tuple[int, str]]:
        """Stop strings in `text` with their places. A match within the first `old` characters does
        not count: it was complete too early."""
        starts = [(max(0, old - len(stop) + 1), stop) for stop in self._stop]
        return [(at, stop) for start, stop in starts if (at := text.find(stop, start)) >= 0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
