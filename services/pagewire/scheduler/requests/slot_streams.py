"""Delivery of a step's tokens from the slots of one worker to the clients, by arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array, pack, pack_floats, pack_unsigned
from pagewire.scheduler.core.batching.slot_table import SlotArray
from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.step_logprobs import Candidates, StepLogprobs
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.token_texts import TokenTexts


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """The rows of one client, among the rows of a step."""

    buffer: DeltaBuffer
    rows: SlotArray | None  # None for all
    streams: bytes  # their stream numbers, packed as uint32


@dataclass(frozen=True, slots=True, eq=False)
class _Addresses:
    """The clients of `slots [n]`; kept for the next step, which often has the same slots."""

    slots: SlotArray
    no_text: Int32Array | None  # [n], or-ed to the tokens; None if every request wants text
    clients: list[_Client]


class SlotStreams:
    """The requests in the slots of one worker, and the delivery of their tokens.

    A steady step is a few array operations. A single request costs Python work when its first token
    arrives, and when a token's text depends on the tokens before or may contain a stop string.
    """

    def __init__(self, num_slots: int, texts: TokenTexts) -> None:
        self._texts = texts
        self._requests: list[Request | None] = [None] * num_slots
        self._text: list[TextStream | None] = [None] * num_slots
        self._streams = np.zeros(num_slots, np.int64)
        self._clients = np.zeros(num_slots, np.int64)  # identities of their buffers
        # Or-ed to the tokens of a slot: INT32_MAX makes them ids outside the vocabulary, whose
        # text is empty, for requests without text.
        self._no_text = np.zeros(num_slots, np.int32)
        # Slots whose next token must be decoded on its own, whatever the token.
        self._one_by_one = np.zeros(num_slots, np.bool_)
        # Slots whose client has not received the size of the prompt yet.
        self._fresh: set[int] = set()
        # Slots of traced requests whose next token is the first one since they took the slot.
        self._traced: set[int] = set()
        self._latest: _Addresses | None = None

    def occupy(self, slot: int, request: Request) -> None:
        """Puts a request into a slot."""
        self._latest = None
        self._requests[slot] = request
        self._text[slot] = request.text
        self._streams[slot] = request.stream
        self._clients[slot] = id(request.buffer)
        self._no_text[slot] = INT32_MAX if request.text is None else 0
        self._one_by_one[slot] = request.text is not None and not request.text.by_table
        if request.trace is not None and request.beams is None:
            self._traced.add(slot)
        else:
            self._traced.discard(slot)
        if request.unreported_prompt:
            self._fresh.add(slot)
        else:
            self._fresh.discard(slot)

    def owner(self, slot: int) -> Request:
        """The request in a live slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} has no owner"
        return request

    def owners(self, slots: SlotArray) -> list[Request]:
        """The requests in live slots [n]."""
        return [self.owner(slot) for slot in slots.tolist()]

    def first_tokens(self, slots: SlotArray) -> list[Request]:
        """The requests in `slots [n]` that have had no token delivered."""
        if not self._fresh:
            return []
        # A request may have ended or moved to another slot before its first token.
        self._fresh = {slot for slot in self._fresh if self._is_fresh(self.owner(slot))}
        return [self.owner(slot) for slot in slots.tolist() if slot in self._fresh]

    def trace_first_tokens(self, slots: SlotArray) -> None:
        """Notes the first tokens of traced requests since they took their slots."""
        if self._traced:
            for slot in self._traced.intersection(slots.tolist()):
                self._traced.remove(slot)
                trace = self.owner(slot).trace
                assert trace is not None
                trace.first_token()

    def candidates(
        self, slots: SlotArray, logprobs: StepLogprobs, token_bytes: Callable[[int], bytes]
    ) -> dict[int, Candidates]:
        """Log probabilities of the rows whose requests want them, by row; adds to their sums.

        `logprobs` has the rows of the live `slots [n]`.
        """
        encoded = {}
        # Packed as a whole, then sliced: one array operation a row would be slower.
        ids, values = pack(logprobs.ids), pack_floats(logprobs.values)
        tokens, stride = logprobs.ids.tolist(), 4 * logprobs.ids.shape[1]
        chosen = logprobs.values[:, 0].tolist()
        requests = self.owners(slots)
        for i, row in enumerate(logprobs.rows.tolist()):
            request = requests[row]
            assert request.sequence is not None
            top = request.sequence.sampling.logprobs
            if top is None:
                continue
            request.cumulative_logprob += chosen[i]
            part = slice(i * stride, i * stride + 4 * (1 + top))
            wanted = tokens[i][: 1 + top]
            pieces = [b""] * len(wanted) if request.text is None else [*map(token_bytes, wanted)]
            encoded[row] = Candidates(
                1 + top, ids[part], values[part], [*map(len, pieces)], b"".join(pieces)
            )
        return encoded

    def deliver(self, outcome: StepOutcome, candidates: Mapping[int, Candidates]) -> list[int]:
        """Delivers each row's token to its client; returns the rows whose sequences have ended.

        `candidates` are the log probabilities of the rows that have some.
        """
        slots = outcome.slots
        to = self._latest
        if to is None or to.slots is not slots:
            to = self._latest = self._addresses(slots)
        tokens = outcome.tokens if to.no_text is None else outcome.tokens | to.no_text
        texts, sizes = self._texts.lookup(tokens)
        singly = (self._one_by_one[slots] | (sizes < 0)).nonzero()[0].tolist()
        if outcome.stopped:
            singly = sorted({*singly, *outcome.stopped})
        ended = {*outcome.stopped, *outcome.ended}
        if singly:
            self._decode(outcome, singly, texts, sizes, ended)
        self._hand_out(outcome, to.clients, texts, sizes, candidates)
        return sorted(ended)

    @staticmethod
    def _is_fresh(request: Request) -> bool:
        return request.open and request.unreported_prompt > 0

    def _addresses(self, slots: SlotArray) -> _Addresses:
        streams, ids = self._streams[slots], self._clients[slots]
        clients = []
        for client in dict.fromkeys(ids.tolist()):
            rows = (ids == client).nonzero()[0]
            buffer = self.owner(int(slots[rows[0]])).buffer
            alone = len(rows) == len(slots)
            clients.append(_Client(buffer, None if alone else rows, pack_unsigned(streams[rows])))
        no_text = self._no_text[slots]
        return _Addresses(slots, no_text if no_text.any() else None, clients)

    def _decode(
        self,
        outcome: StepOutcome,
        rows: list[int],
        texts: list[bytes],
        sizes: Int32Array,
        ended: set[int],
    ) -> None:
        """Replaces texts and sizes of some rows; adds those that a stop string ends to `ended`."""
        slots = outcome.slots[rows]
        lengths, one_by_one = [], []
        tokens = outcome.tokens[rows].tolist()
        for row, slot, token in zip(rows, slots.tolist(), tokens, strict=True):
            text = self._text[slot]
            piece = b""
            at_stop = row in outcome.stopped
            if text is not None and not (at_stop and not self.owner(slot).include_stop_token):
                piece = text.feed(token).encode()
                if text.stop_string is not None:
                    ended.add(row)
            texts[row] = piece
            lengths.append(len(piece))
            one_by_one.append(text is not None and not text.by_table)
        self._one_by_one[slots] = one_by_one
        sizes[rows] = lengths

    def _hand_out(
        self,
        outcome: StepOutcome,
        clients: list[_Client],
        texts: list[bytes],
        sizes: Int32Array,
        candidates: Mapping[int, Candidates],
    ) -> None:
        """Adds to each client's buffer the rows of its requests."""
        indices, tokens = outcome.indices, outcome.tokens
        prompts = self._report_prompts(outcome.slots) if self._fresh else {}
        for client in clients:
            rows, streams = client.rows, client.streams
            if rows is None:
                client.buffer.add_rows(streams, indices, tokens, texts, sizes, prompts, candidates)
                return
            named = rows.tolist()
            client.buffer.add_rows(
                streams,
                indices[rows],
                tokens[rows],
                [texts[row] for row in named],
                sizes[rows],
                {i: prompts[row] for i, row in enumerate(named) if row in prompts},
                {i: candidates[row] for i, row in enumerate(named) if row in candidates},
            )

    def _report_prompts(self, slots: SlotArray) -> dict[int, int]:
        """The prompt sizes that were not reported yet, by row."""
        found = {}
        for row, slot in enumerate(slots.tolist()):
            if slot in self._fresh:
                self._fresh.remove(slot)
                request = self.owner(slot)
                found[row], request.unreported_prompt = request.unreported_prompt, 0
        return found
