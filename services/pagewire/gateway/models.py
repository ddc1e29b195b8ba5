"""The served model that a request gets, and the facts of the model for parsing."""

from collections.abc import Mapping
from typing import NamedTuple

from pagewire.errors import MAX_QUOTED_NAME, Code, RequestError, invalid, quoted
from pagewire.v1 import inference_pb2 as pb


class ServedModel(NamedTuple):
    """The facts of a pb.Model that requests are parsed with; pb.Model explains them."""

    max_model_len: int
    tool_parser: str = ""
    reasoning_parser: str = ""
    reasoning_starts: tuple[int, ...] = ()
    reasoning_end_token: int | None = None
    template_inputs: tuple[str, ...] = ()

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
            tuple(model.template_inputs),
        )

    def reasoning_start(self, thinking: bool | None) -> int:
        """How reasoning begins, by the template's variable for thinking; None if it is not set."""
        place = 0 if thinking is None else 1 if thinking else 2
        if place >= len(self.reasoning_starts):
            return pb.REASONING_START_BY_MODEL
        return self.reasoning_starts[place]


# The models of a gateway by name; None for an expected one that no scheduler has served yet.
Models = Mapping[str, ServedModel | None]


def find_model(name: str | None, models: Models) -> tuple[str, ServedModel]:
    """The model that a request names, or the only one; RequestError if there is none.

    A model that is not served yet is UNAVAILABLE, a name that is not known NOT_FOUND.
    """
    if not models:
        raise RequestError(Code.UNAVAILABLE, "no scheduler serves a model yet; retry later")
    known = ", ".join(sorted(models))
    if name is None and len(models) == 1:
        [name] = models
    if name is None:
        raise invalid("model", f"model is required; served are {known}")
    shown = quoted(name, MAX_QUOTED_NAME)
    if name not in models:
        raise RequestError(
            Code.NOT_FOUND,
            f"the model {shown} does not exist; served are {known}",
            "model",
        )
    served = models[name]
    if served is None:
        raise RequestError(
            Code.UNAVAILABLE,
            f"no scheduler serves the model {shown} yet; retry later",
            "model",
        )
    return name, served
