"""Which served model a request gets, and what parsing a request needs to know of it."""

from collections.abc import Iterable
from typing import NamedTuple

from pagewire.errors import Code, RequestError, invalid
from pagewire.v1 import inference_pb2 as pb


class ServedModel(NamedTuple):
    """The facts of a pb.Model that requests are parsed with; pb.Model explains them."""

    max_model_len: int
    tool_parser: str = ""
    reasoning_parser: str = ""
    reasoning_starts: tuple[int, ...] = ()
    reasoning_end_token: int | None = None

    @classmethod
    def of(cls, model: pb.Model) -> "ServedModel":
        """The facts of a model."""
        ends = model.HasField("reasoning_end_token_id")
        return cls(
            model.max_model_len,
            model.tool_parser,
            model.reasoning_parser,
            tuple(model.reasoning_starts),
            model.reasoning_end_token_id if ends else None,
        )

    def reasoning_start(self, thinking: bool | None) -> int:
        """How reasoning begins, with the template's variable for thinking given or not."""
        place = 0 if thinking is None else 1 if thinking else 2
        if place >= len(self.reasoning_starts):
            return pb.REASONING_START_BY_MODEL
        return self.reasoning_starts[place]


def find_model(name: str | None, served: Iterable[str]) -> str:
    """The model that a request names, or the only one; RequestError if there is none."""
    names = sorted(served)
    if not names:
        raise RequestError(Code.UNAVAILABLE, "no scheduler serves a model yet; retry later")
    known = ", ".join(names)
    if name is None and len(names) == 1:
        return names[0]
    if name is None:
        raise invalid("model", f"model is required; served are {known}")
    if name not in names:
        raise RequestError(
            Code.NOT_FOUND, f"the model {name!r} does not exist; served are {known}", "model"
        )
    return name
