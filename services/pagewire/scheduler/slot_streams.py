"""Where the tokens of one worker's slots go, as arrays: clients, stream numbers, text."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.step_plan import StepOutcome
from pagewire.scheduler.logprobs import Candidates
from pagewire.scheduler.open_request import Request
from pagewire.scheduler.token_texts import TokenTexts

# How a slot's tokens become text: not at all; by table, whatever came before; one by one.
_SILENT, _BY_TABLE, _ONE_BY_ONE = 0, 1, 2


class SlotStreams:
    """The requests in the slots of one worker, and what delivering a step asks of them.

    A steady step is a few array operations. Python looks at a single request when its first token
    arrives, or a token's text depends on the tokens before or may contain a stop string.
    """

    def __init__(self, num_slots: int, texts: TokenTexts) -> None:
        self._texts = texts
        self._requests: list[Request | None] = [None] * num_slots
        self._streams = np.zeros(num_slots, np.int64)
        self._clients = np.zeros(num_slots, np.int64)  # identities of their buffers
        self._decoding = np.zeros(num_slots, np.int8)
        self._unreported = np.zeros(num_slots, np.int64)

    def occupy(self, slot: int, request: Request) -> None:
        """A request takes a slot."""
        self._requests[slot] = request
        self._streams[slot] = request.stream
        self._clients[slot] = id(request.buffer)
        self._unreported[slot] = request.unreported_prompt
        self._note_decoding(slot, request)

    def owner(self, slot: int) -> Request:
        """The request in a live slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} has no owner"
        return request

    def owners(self, slots: Int32Array) -> list[Request]:
        """The requests in live slots [n]."""
        return [self.owner(slot) for slot in slots.tolist()]

    def first_tokens(self, slots: Int32Array) -> list[Request]:
        """The requests in `slots [n]` of which no token has been delivered."""
        return self.owners(slots[self._unreported[slots] > 0])

    def deliver(self, outcome: StepOutcome, candidates: Mapping[int, Candidates]) -> list[int]:
        """Hands each row's token to its client; the rows whose sequences have ended.

        `candidates` has those of the rows that have some.
        """
        slots, tokens = outcome.slots, outcome.tokens
        decoding = self._decoding[slots]
        by_table = (decoding == _BY_TABLE) & ~outcome.stopped & self._texts.whole(tokens)
        texts, sizes = self._texts.lookup(tokens, by_table)
        ended = outcome.stopped | outcome.ended
        for row in np.flatnonzero((decoding != _SILENT) & ~by_table).tolist():
            slot = int(slots[row])
            request = self.owner(slot)
            texts[row] = _decode(request, int(tokens[row]), bool(outcome.stopped[row]))
            sizes[row] = len(texts[row])
            ended[row] |= request.text is not None and request.text.stop_string is not None
            self._note_decoding(slot, request)
        self._hand_out(outcome, texts, sizes, candidates)
        return np.flatnonzero(ended).tolist()

    def _hand_out(
        self,
        outcome: StepOutcome,
        texts: list[bytes],
        sizes: NDArray[np.int64],
        candidates: Mapping[int, Candidates],
    ) -> None:
        """Gives each client the rows of its requests."""
        slots = outcome.slots
        streams, prompts = self._streams[slots], self._unreported[slots]
        for slot in slots[prompts > 0].tolist():
            self.owner(slot).unreported_prompt = 0
        self._unreported[slots] = 0
        clients = self._clients[slots]
        if (clients == clients[0]).all():
            buffer = self.owner(int(slots[0])).buffer
            buffer.add_rows(
                streams, outcome.indices, outcome.tokens, texts, sizes, prompts, candidates
            )
            return
        for client in dict.fromkeys(clients.tolist()):
            rows = np.flatnonzero(clients == client)
            named = rows.tolist()
            self.owner(int(slots[rows[0]])).buffer.add_rows(
                streams[rows],
                outcome.indices[rows],
                outcome.tokens[rows],
                [texts[row] for row in named],
                sizes[rows],
                prompts[rows],
                {i: candidates[row] for i, row in enumerate(named) if row in candidates},
            )

    def _note_decoding(self, slot: int, request: Request) -> None:
        text = request.text
        by_table = _BY_TABLE if text is not None and text.by_table else _ONE_BY_ONE
        self._decoding[slot] = _SILENT if text is None else by_table


def _decode(request: Request, token: int, stopped: bool) -> bytes:
    """The text that a token completes."""
    assert request.text is not None
    if stopped and not request.include_stop_token:
        return b""
    return request.text.feed(token).encode()
