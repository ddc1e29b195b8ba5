"""Calls between text and token ids, checked before they are sent."""

from operator import index
from typing import Any

from pagewire.errors import invalid
from pagewire.llm.params import encodable_texts
from pagewire.llm.prompts import listed
from pagewire.v1 import inference_pb2 as pb


def tokenize_request(text: Any, add_special_tokens: Any) -> pb.TokenizeRequest:
    """The call for a text; RequestError names what is not valid."""
    if not isinstance(text, str):
        raise invalid("text", f"text is of type {type(text).__name__}; give one text")
    _check_bool("add_special_tokens", add_special_tokens)
    with encodable_texts():
        return pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)


def detokenize_request(
    token_ids: Any, skip_special_tokens: Any, vocab_size: int
) -> pb.DetokenizeRequest:
    """The call for token ids; RequestError names what is not valid."""
    _check_bool("skip_special_tokens", skip_special_tokens)
    wanted = "a list of token ids"
    ids = []
    for place, token in enumerate(listed(token_ids, "token_ids", wanted)):
        try:
            ids.append(index(token))
        except TypeError:
            raise invalid("token_ids", f"token_ids[{place}] is {token!r}; give {wanted}") from None
        if not 0 <= ids[-1] < vocab_size:
            raise invalid(
                "token_ids",
                f"token_ids[{place}] is {token}, and the model has the ids 0 to {vocab_size - 1}; "
                "remove it",
            )
    return pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip_special_tokens)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(name, f"{name} is {value!r}; give True or False")
