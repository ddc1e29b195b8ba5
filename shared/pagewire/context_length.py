"""The error of a request that is longer than the model's context.

LiteLLM recognizes it by OpenAI's words, other clients by its code. LangChain looks for the code in
the message, so the message ends with the code.
"""

from pagewire.errors import Code, RequestError

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def context_length_exceeded(
    length: str,
    prompt: int,
    completion: int,
    *,
    exact: bool = True,
    part: str = "prompt",
    field: str = "prompt",
) -> RequestError:
    """The error of `prompt` and `completion` tokens that do not fit into a context.

    `length` is the context's, such as "200 tokens". Not `exact`: the prompt has more than `prompt`
    tokens, because tokenization stopped there. `part` is the name of the prompt: "messages" or
    "prompt". `field` is the field that must change.
    """
    more = "" if exact else "more than "
    fault = f": {field}" if field.endswith("_tokens") else ""
    return RequestError(
        Code.INVALID_ARGUMENT,
        f"This model's maximum context length is {length}. However, you requested {more}"
        f"{prompt + completion} tokens ({more}{prompt} in the {part}, {completion} in the "
        f"completion). Please reduce the length of the {part} or completion. "
        f"({CONTEXT_LENGTH_EXCEEDED}{fault})",
        field,
        reason=CONTEXT_LENGTH_EXCEEDED,
    )
