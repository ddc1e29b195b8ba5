"""The worker's state of the sequences that a program continues."""

from collections import deque
from dataclasses import dataclass, field

from pagewire.worker.command.messages import Piece
from pagewire.worker.command.text import ProgramText
from pagewire.worker.protocol.steps.step import Start


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence has no token. `field` is the parameter at fault, if one is."""

    message: str
    retryable: bool
    field: str = ""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence in a slot, with the tokens that the program has sent and no step has taken yet.

    `end_token` is returned when the program ends the output; None if the program may not end it.
    """

    id: str
    max_tokens: int
    least_tokens: int  # before `end_token` is allowed
    end_token: int | None
    vocab_size: int
    end_tokens: frozenset[int] = frozenset()  # those of the request and of the model
    tokens: deque[int] = field(default_factory=deque)
    num_received: int = 0
    ended: bool = False
    closed: bool = False  # the program sends no more
    failure: Failure | None = None
    num_rows: int = 0  # of steps that are not answered
    dropped: bool = False  # no later step names it

    @classmethod
    def of(
        cls, sequence_id: str, start: Start, end_token: int | None, vocab_size: int
    ) -> "LiveSequence":
        """The sequence that a step starts; `end_token` is the model's end-of-sequence token."""
        return cls(
            sequence_id,
            start.max_new_tokens,
            max(0, start.sampling.min_tokens - start.num_generated),
            end_token if end_token in start.end_token_ids else None,
            vocab_size,
            frozenset(start.end_token_ids),
        )

    @property
    def answerable(self) -> bool:
        """Whether a step can be answered without waiting for the program."""
        complete = self.num_received >= self.max_tokens
        return bool(self.tokens) or self.ended or complete or self.failure is not None

    def receive(self, piece: Piece, text: ProgramText | None) -> None:
        """Adds a piece of output; an invalid piece fails the sequence."""
        self.closed |= piece.finished or piece.error is not None
        if self.ended or self.failure is not None:
            return
        if piece.error is not None:
            self.failure = Failure(f"the program refused: {piece.error}", retryable=False)
            return
        tokens: list[int] | None = list(piece.token_ids)
        if piece.text:
            tokens = None if text is None or tokens else text.encode(piece.text)
        if tokens is None:
            self._fail("wrote text that has no token ids, or that it had not announced")
        elif any(token >= self.vocab_size for token in tokens):
            self._fail(f"wrote a token id above {self.vocab_size - 1}, the model's last one")
        else:
            self._add(tokens)
            if piece.finished and not self.ended:
                self._end()

    def take(self) -> int:
        """The next token; after the end of the output, any token. Steps that were sent before the
        end was known still have rows for the sequence."""
        if self.tokens:
            return self.tokens.popleft()
        return self.end_token or 0

    def _add(self, tokens: list[int]) -> None:
        """Adds tokens up to the one that ends the output, or to `max_tokens`."""
        for token in tokens[: max(0, self.max_tokens - self.num_received)]:
            self.tokens.append(token)
            self.num_received += 1
            if token in self.end_tokens and self.num_received > self.least_tokens:
                self.ended = True
                return

    def _end(self) -> None:
        if self.num_received >= self.max_tokens:
            return  # the scheduler ends it
        if self.end_token is None:
            self._fail("ended the output, which ignore_eos does not allow", "ignore_eos")
        elif self.num_received < self.least_tokens:
            self._fail("ended the output before min_tokens", "min_tokens")
        else:
            self.ended = True

    def _fail(self, what: str, parameter: str = "") -> None:
        # Tokens that arrived before are delivered first.
        self.failure = Failure(f"the program {what}", False, parameter)
