"""Ids of tool calls."""

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits
_SHORT_ID = 9


def new_call_id(short: bool) -> str:
    """An id of a tool call; a short one has nine letters and digits, see ToolFormat."""
    if short:
        return "".join(secrets.choice(_ALPHABET) for _ in range(_SHORT_ID))
    return f"call_{secrets.token_hex(12)}"
