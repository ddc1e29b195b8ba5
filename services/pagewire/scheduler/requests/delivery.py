"""The deltas that wait for a client: those of one step, or of several if it lags."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pagewire.packing import Int32Array, pack, pack_unsigned
from pagewire.scheduler.requests.step_logprobs import CandidateBuffer, Candidates
from pagewire.v1 import inference_pb2 as pb

# The rows, and the bytes of prompts and vectors, at which a message is full. Messages must stay far
# below gRPC's largest message.
PAGE_ROWS = 1 << 16
PAGE_LARGE_BYTES = 1 << 23


@dataclass(slots=True, eq=False)
class DeltaBuffer:
    """The deltas and ends of all requests of one client stream that were not sent yet.

    A client that lags gets larger messages instead of many, so the memory is bounded by the outputs
    of its open requests. `ready` is set while there is something to send. `read` is cleared while
    whole pages wait: no request should be read from that client then.

    `moves`: the client, a gateway, continues requests elsewhere that end with UNAVAILABLE.
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
    prompts: list[pb.PromptOutput] = field(default_factory=list)
    # Of the prompts, and of the vectors in `finished`.
    large_bytes: int = 0
    finished: list[pb.StreamFinish] = field(default_factory=list)
    candidates: CandidateBuffer = field(default_factory=CandidateBuffer)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    read: asyncio.Event = field(default_factory=asyncio.Event)
    # Messages that the client has sent and the service has read.
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
        """Adds one new token of each of n requests.

        The arrays [n] and `texts` are parallel; `streams` are the stream numbers, packed as uint32.
        By row: `prompts` has the prompt sizes to report, `candidates` the log probabilities of the
        tokens that have some.
        """
        for row, candidate in candidates.items():
            self.candidates.add(self.entries + row, candidate)
        for row, size in prompts.items():
            _pad(self.prompt_tokens, self.entries + row, 0)
            self.prompt_tokens.append(size)
        self._add_entries(len(texts), streams, pack(indices), pack(text_sizes))
        self.token_ids.append(pack(tokens))
        self.text.append(b"".join(texts))
        self.ready.set()
        if self.entries >= PAGE_ROWS:
            self._end_page()

    def add_prompt(self, output: pb.PromptOutput) -> None:
        """Adds the prompt output of a request, before its first token."""
        self.prompts.append(output)
        self.ready.set()
        self._add_large(output.ByteSize())

    def add_finish(self, stream: int, finish: pb.Finish, index: int, text: str = "") -> None:
        """Adds the end of a request: `text` was held back until now, `index` is its token count."""
        if text:
            data = text.encode()
            _pad(self.token_counts, self.entries, 1)
            self.token_counts.append(0)
            self._add_entries(1, *(pack_unsigned([value]) for value in (stream, index, len(data))))
            self.text.append(data)
        self.finished.append(pb.StreamFinish(stream=stream, finish=finish))
        self.ready.set()
        if finish.pooled:
            self._add_large(len(finish.pooled))

    def take(self) -> pb.MultiplexResponse:
        """The oldest page, or everything if there is none; clears `ready` when nothing is left."""
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

    def _add_large(self, size: int) -> None:
        self.large_bytes += size
        if self.large_bytes >= PAGE_LARGE_BYTES:
            self._end_page()

    def _end_page(self) -> None:
        self._pages.append(self._page())
        self.read.clear()

    def _page(self) -> pb.MultiplexResponse:
        """A message of everything that is on no page yet."""
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
        if self.prompts:
            message.prompts.extend(self.prompts)
            self.prompts.clear()
        if self.finished:
            message.finished.extend(self.finished)
            self.finished.clear()
        self.candidates.move_to(message, self.entries)
        self.entries = self.large_bytes = 0
        for part in (self.streams, self.indices, self.text_sizes, self.token_ids, self.text):
            part.clear()
        return message


def _pad(values: list[int], length: int, usual: int) -> None:
    """Fills in the values of the entries since the last one that was given."""
    values += [usual] * (length - len(values))
