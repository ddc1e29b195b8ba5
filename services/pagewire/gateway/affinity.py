"""Which scheduler a prompt prefers, so that a conversation returns to the cache that has its KV.

Rendezvous hashing: the head of a prompt orders the schedulers. A scheduler that joins or leaves
changes the preferred scheduler of its own prompts only. The gateway has no tokenizer, so it hashes
text.
"""

from collections.abc import Sequence
from hashlib import blake2b

from pagewire.v1 import inference_pb2 as pb

# The head of a plain prompt. A shorter prompt has almost nothing to reuse from a cache.
HEAD_CHARACTERS = 512
HEAD_TOKENS = 128


def prompt_head(request: pb.GenerateRequest, cache_key: str | None = None) -> bytes:
    """A digest of the beginning that a prompt shares with its continuations; empty if too short.

    If the client names shared prompts by a `cache_key`, the digest is of this key.

    For a conversation the digest covers the messages up to the user's first one, which every later
    request repeats. A system prompt alone would send all conversations to the same scheduler.
    """
    if cache_key:
        return _digest(f"{request.model}\0{request.cache_salt}\0key\0{cache_key}")
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
        plain = request.pair.query if kind == "pair" else request.prompt
        text = plain[:HEAD_CHARACTERS] if len(plain) >= HEAD_CHARACTERS else ""
    if not text:
        return b""
    return _digest(f"{request.model}\0{request.cache_salt}\0{text}")


def by_preference(head: bytes, targets: Sequence[str]) -> list[str]:
    """The targets, ordered by the preference of the head."""

    def weight(target: str) -> bytes:
        return blake2b(head, digest_size=8, person=_digest(target)).digest()

    return sorted(targets, key=weight)


def _digest(target: str) -> bytes:
    return blake2b(target.encode(), digest_size=16).digest()
