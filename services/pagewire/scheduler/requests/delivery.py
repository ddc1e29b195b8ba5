"""What a client is to be sent: the deltas of one step, or of several if it lags."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pagewire.packing import Int32Array, pack, pack_unsigned
from pagewire.scheduler.requests.step_logprobs import CandidateBuffer, Candidates
from pagewire.v1 import inference_pb2 as pb

# Rows of one message; it must stay far below the largest that gRPC sends.
PAGE_ROWS = 1 << 16


@dataclass(slots=True, eq=False)
class DeltaBuffer:
    """The news of all requests of one client stream since it last took them.

    A client that lags gets larger messages instead of many, so what waits here is bounded by the
    outputs of its open requests. While whole pages wait, `read` is not set, and no request should
    be taken from that client.

    `moves` is whether the client continues elsewhere what ends with UNAVAILABLE, as gateways do.
    """

    moves: bool = False
    entries: int = 0
    streams: list[bytes] = field(default_factory=list)
    indices: list[bytes] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    text_sizes: list[bytes] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    token_ids: list[bytes] = field(default_factory=list)
    text: list[bytes] = field(default_factory=list)
    finished: list[pb.StreamFinish] = field(default_factory=list)
    candidates: CandidateBuffer = field(default_factory=CandidateBuffer)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    read: asyncio.Event = field(default_factory=asyncio.Event)
    # Messages of the client that were read.
    received: int = 0
    _pages: deque[pb.MultiplexResponse] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.read.set()

    def add_rows(
        self,
        streams: bytes,
        indices: Int32Array,
        tokens: Int32Array,
        texts: list[bytes],
        text_sizes: Int32Array,
        prompts: Mapping[int, int] = MappingProxyType({}),
        candidates: Mapping[int, Candidates] = MappingProxyType({}),
    ) -> None:
        """One new token of each of several requests; the arrays and `texts` are parallel, and so
        are `streams`, the numbers of the requests as they travel.

        `prompts` has the sizes of prompts that are to be told, `candidates` those of the tokens
        that have some, both by their place in the arrays.
        """
        for row, its_own in candidates.items():
            self.candidates.add(self.entries + row, its_own)
        for row, size in prompts.items():
            _pad(self.prompt_tokens, self.entries + row, 0)
            self.prompt_tokens.append(size)
        self._add_entries(len(texts), streams, pack(indices), pack(text_sizes))
        self.token_ids.append(pack(tokens))
        self.text.append(b"".join(texts))
        self.ready.set()
        if self.entries >= PAGE_ROWS:
            self._pages.append(self._page())
            self.read.clear()

    def add_finish(self, stream: int, finish: pb.Finish, index: int, text: str = "") -> None:
        """The end of a request; `text` is what had been held back, `index` its token count."""
        if text:
            data = text.encode()
            _pad(self.token_counts, self.entries, 1)
            self.token_counts.append(0)
            self._add_entries(1, *(pack_unsigned([value]) for value in (stream, index, len(data))))
            self.text.append(data)
        self.finished.append(pb.StreamFinish(stream=stream, finish=finish))
        self.ready.set()

    def take(self) -> pb.MultiplexResponse:
        """The oldest page, or all there is; clears `ready` when nothing is left."""
        if not self._pages:
            self.ready.clear()
            return self._page()
        page = self._pages.popleft()
        if not self._pages:
            self.read.set()
        return page

    def _add_entries(self, count: int, streams: bytes, indices: bytes, text_sizes: bytes) -> None:
        self.entries += count
        self.streams.append(streams)
        self.indices.append(indices)
        self.text_sizes.append(text_sizes)

    def _page(self) -> pb.MultiplexResponse:
        """Everything that is on no page yet."""
        message = pb.MultiplexResponse(
            streams=b"".join(self.streams),
            indices=b"".join(self.indices),
            text_sizes=b"".join(self.text_sizes),
            token_ids=b"".join(self.token_ids),
            text=b"".join(self.text),
        )
        if self.token_counts:
            _pad(self.token_counts, self.entries, 1)
            message.token_counts.extend(self.token_counts)
            self.token_counts.clear()
        if self.prompt_tokens:
            _pad(self.prompt_tokens, self.entries, 0)
            message.prompt_tokens.extend(self.prompt_tokens)
            self.prompt_tokens.clear()
        if self.finished:
            message.finished.extend(self.finished)
            self.finished.clear()
        self.candidates.move_to(message, self.entries)
        self.entries = 0
        for part in (self.streams, self.indices, self.text_sizes, self.token_ids, self.text):
            part.clear()
        return message


def _pad(values: list[int], length: int, usual: int) -> None:
    """Makes explicit the values that entries have which are not mentioned."""
    values += [usual] * (length - len(values))
