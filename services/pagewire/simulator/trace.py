"""Traces of production requests: arrivals, lengths, and prefixes that requests share.

Two formats are read:
- CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's LLM inference traces);
- JSON lines with timestamp (milliseconds), input_length, output_length and hash_ids (Mooncake's
  traces). There is a hash id for each 512 tokens of the input. Equal ids stand for equal tokens
  with equal tokens before them.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array

HASHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; `arrival` is in seconds after the first one's."""

    number: int
    arrival: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None

    def prompt(self) -> Int32Array:
        """Token ids [input_length], equal where hash ids are equal; without hash ids all differ
        from those of other requests."""
        if self.hash_ids is None:
            return np.full(self.input_length, self.number, np.int32)
        ids = np.array(self.hash_ids, np.int32)
        offsets = np.tile(np.arange(HASHED_TOKENS, dtype=np.int32), len(ids))
        tokens: Int32Array = np.repeat(ids, HASHED_TOKENS) * HASHED_TOKENS + offsets
        return tokens[: self.input_length]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file in order of arrival; ValueError names the first invalid one."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = _from_json(file) if path.suffix == ".jsonl" else _from_csv(file)
        requests = []
        try:
            for request in lines:
                requests.append(_checked(request))  # noqa: PERF401, the error needs its length
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{path}: request {len(requests) + 1} is invalid: {error!r}; a trace has the "
                "columns TIMESTAMP,ContextTokens,GeneratedTokens, or as .jsonl the fields "
                "timestamp, input_length, output_length, hash_ids"
            ) from error
    if not requests:
        raise ValueError(f"{path} holds no request")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [replace(r, number=i, arrival=r.arrival - first) for i, r in enumerate(requests)]


def ideal_block_hit_rate(requests: list[TraceRequest]) -> float | None:
    """The share of the trace's hash ids that repeat: the hit rate of an unlimited cache.

    None if the trace has no hash ids.
    """
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        if request.hash_ids is None:
            return None
        found += sum(hash_id in seen for hash_id in request.hash_ids)
        total += len(request.hash_ids)
        seen.update(request.hash_ids)
    return found / total


def _from_csv(lines: Iterator[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        # Azure writes seven digits of a second, datetime reads six.
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield TraceRequest(
            0, moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), None
        )


def _from_json(lines: Iterator[str]) -> Iterator[TraceRequest]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            yield TraceRequest(
                0,
                row["timestamp"] / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(row["hash_ids"]),
            )


def _checked(request: TraceRequest) -> TraceRequest:
    if request.input_length < 1 or request.output_length < 1:
        raise ValueError("a request needs at least one token in and one out")
    if not math.isfinite(request.arrival):
        raise ValueError("the timestamp must be a finite number")
    ids = request.hash_ids
    if ids is not None:
        if len(ids) != -(-request.input_length // HASHED_TOKENS):
            raise ValueError(f"{len(ids)} hash_ids for {request.input_length} tokens")
        if min(ids) < 0 or max(ids) > INT32_MAX // HASHED_TOKENS - 1:
            raise ValueError(f"hash_ids must be 0 to {INT32_MAX // HASHED_TOKENS - 1}")
    return request
