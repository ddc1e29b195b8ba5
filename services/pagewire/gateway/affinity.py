"""Which scheduler a prompt belongs to, so that a conversation returns to the cache that knows it.

Rendezvous hashing: a prompt's head orders the schedulers, and one that comes or goes moves only
the prompts that are its own. The gateway has no tokenizer, so what is hashed is text.
"""

from collections.abc import Sequence
from hashlib import blake2b

from pagewire.v1 import inference_pb2 as pb

# Of a plain prompt. Shorter prompts have next to nothing to find in a cache.
HEAD_CHARACTERS = 512
HEAD_TOKENS = 128


def head(request: pb.GenerateRequest) -> bytes:
    """A digest of what a prompt has in common with those that continue it; empty if that is short.

    Of a conversation these are the messages up to the user's first, which every later turn
    repeats; system prompts alone would send everybody to the same scheduler.
    """
    kind = request.WhichOneof("input")
    if kind == "chat":
        parts = []
        for message in request.chat.messages:
            parts.append(f"{message.role}\0{message.content}\0")
            if message.role == "user":
                break
        text = "".join(parts)
    elif kind == "prompt_token_ids":
        ids = request.prompt_token_ids.ids
        text = ",".join(map(str, ids[:HEAD_TOKENS])) if len(ids) >= HEAD_TOKENS else ""
    else:
        text = request.prompt[:HEAD_CHARACTERS] if len(request.prompt) >= HEAD_CHARACTERS else ""
    if not text:
        return b""
    key = f"{request.model}\0{request.cache_salt}\0{text}".encode()
    return blake2b(key, digest_size=16).digest()


def in_order(key: bytes, targets: Sequence[str]) -> list[str]:
    """The targets, those first that the key prefers."""

    def weight(target: str) -> bytes:
        return blake2b(key, digest_size=8, person=_digest(target)).digest()

    return sorted(targets, key=weight)


def _digest(target: str) -> bytes:
    return blake2b(target.encode(), digest_size=16).digest()
