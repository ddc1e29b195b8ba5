"""A limit of the reasoning at the beginning of an output."""

from llguidance import LLTokenizer

from pagewire.worker.protocol.constraints.constraint import Constraint


class ReasoningBudget:
    """Counts the tokens of the reasoning, and forces its end at the limit.

    Its state depends on the tokens alone.
    """

    def __init__(self, constraint: Constraint, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin = constraint.reasoning_begin.encode()  # empty once the reasoning has begun
        self._end = constraint.reasoning_end.encode()
        self._end_ids = constraint.reasoning_end_ids.tolist()
        self._left = constraint.max_reasoning_tokens  # below 0: minus the tokens of the end so far
        self._text = b""
        self._over = False

    @property
    def forced_token(self) -> int | None:
        """The token that must come next; None if others may."""
        if self._over or self._begin or self._left > 0:
            return None
        return int(self._end_ids[-self._left])

    def advance(self, token: int) -> None:
        """Takes the next token of the output."""
        if self._over:
            return
        self._text += self._tokenizer.decode_bytes([token])
        if self._begin:
            text = self._text.lstrip()
            if text.startswith(self._begin):
                self._text, self._begin = text[len(self._begin) :], b""
            elif not self._begin.startswith(text):
                self._over = True  # the model does not reason
            return
        self._left -= 1
        self._over = self._end in self._text or self._left == -len(self._end_ids)
        self._text = self._text[-len(self._end) :]
