"""Documents as rows of tokens: whole documents one after the other, the rest padding.

Only answers and plain texts are learned; the user's messages are context.
"""

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tools.embedded_model.corpus import documents
from tools.embedded_model.tokenizer import PAD_ID, TURN_END_ID, TURN_START_ID, render

Ids = npt.NDArray[np.int16]
Mask = npt.NDArray[np.bool_]
SHARD = 4000  # documents


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed token rows, the mask of learned tokens, and the digests of the documents."""

    ids: Ids  # [rows, length]
    learned: Mask  # [rows, length]
    digests: frozenset[bytes]


def answer_mask(ids: Ids, assistant_id: int) -> Mask:
    """The learned tokens of one rendered document: all of a text, the answers of a chat.

    An answer is the text after the assistant's header, up to and with its end-of-turn token.
    """
    if ids[0] != TURN_START_ID:
        return np.ones(len(ids), dtype=np.bool_)
    index = np.arange(len(ids))
    start = np.maximum.accumulate(np.where(ids == TURN_START_ID, index, 0))
    role = ids[np.minimum(start + 1, len(ids) - 1)]
    ends = np.cumsum(ids == TURN_END_ID) - (ids == TURN_END_ID)  # ends strictly before a token
    inside = ends == ends[start]
    mask: Mask = (role == assistant_id) & inside & (index > start + 2)
    return mask


def _shard(
    tokenizer_json: str, length: int, seed: int, skip: frozenset[bytes], first: int, last: int
) -> Rows:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    assistant_id = tokenizer.encode("assistant").ids[0]
    ids = np.full((1, length), PAD_ID, dtype=np.int16)
    learned = np.zeros((1, length), dtype=np.bool_)
    rows: list[tuple[Ids, Mask]] = []
    at = 0
    digests: set[bytes] = set()
    texts: list[str] = []
    for document in documents(seed, first, last):
        text = render(document)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        if digest not in skip:
            digests.add(digest)
            texts.append(text)
    for encoding in tokenizer.encode_batch(texts):
        tokens = np.array(encoding.ids[:length], dtype=np.int16)
        if at + len(tokens) > length:
            rows.append((ids, learned))
            ids = np.full((1, length), PAD_ID, dtype=np.int16)
            learned = np.zeros((1, length), dtype=np.bool_)
            at = 0
        ids[0, at : at + len(tokens)] = tokens
        learned[0, at : at + len(tokens)] = answer_mask(tokens, assistant_id)
        at += len(tokens)
    rows.append((ids, learned))
    return Rows(
        np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows]),
        frozenset(digests),
    )  # fmt: skip


def pack(
    tokenizer: Tokenizer,
    seed: int,
    count: int,
    length: int,
    skip: frozenset[bytes] = frozenset(),
) -> Rows:
    """The first ``count`` documents of a seed as rows of ``length`` tokens.

    Documents whose digest is in ``skip`` are left out, so held-out text is never training text.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    work = partial(_shard, tokenizer.to_str(), length, seed, skip)
    firsts = range(0, count, SHARD)
    lasts = [min(first + SHARD, count) for first in firsts]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        shards = list(pool.map(work, firsts, lasts))
    return Rows(
        np.concatenate([s.ids for s in shards]),
        np.concatenate([s.learned for s in shards]),
        frozenset().union(*(s.digests for s in shards)),
    )
