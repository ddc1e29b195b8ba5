"""What an answer shows beside its text, if the request asks for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Details:
    """`token_ids`: those of prompt and output. `usage`: the token counts in every chunk.

    The ids of a prompt are in its choices if `prompt_in_choice`, otherwise beside them.
    """

    token_ids: bool
    usage: bool
    prompt_in_choice: bool
