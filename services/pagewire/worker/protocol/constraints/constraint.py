"""The constraint of a sequence as it arrives."""

from dataclasses import dataclass

from pagewire.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Constraint:
    """See `Constraint` in worker.proto."""

    grammar: str = ""
    begin_after: str = ""
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @classmethod
    def from_proto(cls, message: pb.Constraint) -> "Constraint":
        """Decodes a message; its grammar is not compiled yet."""
        return cls(
            grammar=message.grammar,
            begin_after=message.begin_after,
            end_token_ids=tuple(message.end_token_ids),
            min_tokens=message.min_tokens,
        )

    def fault(self, vocab_size: int) -> str | None:
        """The reason why it is invalid, as far as that is known without compiling; or None."""
        if any(token >= vocab_size for token in self.end_token_ids):
            return f"an end token id is not in the vocabulary of {vocab_size}"
        if self.grammar and not self.end_token_ids:
            return "a grammar needs end_token_ids, or its sequence could not end"
        if self.begin_after and not self.grammar:
            return "begin_after needs a grammar"
        return None
