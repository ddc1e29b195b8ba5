"""Where the tokens of one worker's slots go, as arrays: clients, stream numbers, text."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX
from pagewire.scheduler.core.slot_table import Slots
from pagewire.scheduler.core.step_plan import StepOutcome
from pagewire.scheduler.logprobs import Candidates
from pagewire.scheduler.open_request import Request
from pagewire.scheduler.token_texts import TokenTexts


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
        # Or-ed to the tokens of a request without text: ids outside the vocabulary have none.
        self._silence = np.zeros(num_slots, np.int32)
        # Whose next token's text is not that of the table, whatever the token.
        self._one_by_one = np.zeros(num_slots, np.bool_)
        # Slots whose request has not been told the size of its prompt.
        self._fresh: set[int] = set()

    def occupy(self, slot: int, request: Request) -> None:
        """A request takes a slot."""
        self._requests[slot] = request
        self._streams[slot] = request.stream
        self._clients[slot] = id(request.buffer)
        self._silence[slot] = INT32_MAX if request.text is None else 0
        self._one_by_one[slot] = request.text is not None and not request.text.by_table
        if request.unreported_prompt:
            self._fresh.add(slot)
        else:
            self._fresh.discard(slot)

    def owner(self, slot: int) -> Request:
        """The request in a live slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} has no owner"
        return request

    def owners(self, slots: Slots) -> list[Request]:
        """The requests in live slots [n]."""
        return [self.owner(slot) for slot in slots.tolist()]

    def first_tokens(self, slots: Slots) -> list[Request]:
        """The requests in `slots [n]` of which no token has been delivered."""
        if not self._fresh:
            return []
        return [self.owner(slot) for slot in slots.tolist() if slot in self._fresh]

    def deliver(self, outcome: StepOutcome, candidates: Mapping[int, Candidates]) -> list[int]:
        """Hands each row's token to its client; the rows whose sequences have ended.

        `candidates` has those of the rows that have some.
        """
        slots = outcome.slots
        texts, sizes, partial = self._texts.lookup(outcome.tokens | self._silence[slots])
        ended = outcome.stopped | outcome.ended
        singly = (self._one_by_one[slots] | partial | outcome.stopped).nonzero()[0]
        if len(singly):
            self._decode(outcome, singly, texts, ended)
            sizes[singly] = [len(texts[row]) for row in singly.tolist()]
        self._hand_out(outcome, texts, sizes, candidates)
        return ended.nonzero()[0].tolist()

    def _decode(
        self, outcome: StepOutcome, rows: Slots, texts: list[bytes], ended: NDArray[np.bool_]
    ) -> None:
        """Replaces the texts of some rows, and marks those that a stop string has ended."""
        slots, tokens = outcome.slots[rows].tolist(), outcome.tokens[rows].tolist()
        stopped = outcome.stopped[rows].tolist()
        for row, slot, token, at_stop in zip(rows.tolist(), slots, tokens, stopped, strict=True):
            request = self.owner(slot)
            text = request.text
            if text is None:
                continue
            silent = at_stop and not request.include_stop_token
            texts[row] = b"" if silent else text.feed(token).encode()
            if text.stop_string is not None:
                ended[row] = True
            self._one_by_one[slot] = not text.by_table

    def _hand_out(
        self,
        outcome: StepOutcome,
        texts: list[bytes],
        sizes: NDArray[np.int64],
        candidates: Mapping[int, Candidates],
    ) -> None:
        """Gives each client the rows of its requests."""
        slots = outcome.slots
        streams, clients = self._streams[slots], self._clients[slots]
        prompts = self._report_prompts(slots) if self._fresh else {}
        if np.count_nonzero(clients == clients[0]) == len(clients):
            buffer = self.owner(int(slots[0])).buffer
            buffer.add_rows(
                streams, outcome.indices, outcome.tokens, texts, sizes, prompts, candidates
            )
            return
        for client in dict.fromkeys(clients.tolist()):
            rows = (clients == client).nonzero()[0]
            named = rows.tolist()
            self.owner(int(slots[rows[0]])).buffer.add_rows(
                streams[rows],
                outcome.indices[rows],
                outcome.tokens[rows],
                [texts[row] for row in named],
                sizes[rows],
                {i: prompts[row] for i, row in enumerate(named) if row in prompts},
                {i: candidates[row] for i, row in enumerate(named) if row in candidates},
            )

    def _report_prompts(self, slots: Slots) -> dict[int, int]:
        """The sizes of prompts not told yet, by row."""
        found = {}
        for row, slot in enumerate(slots.tolist()):
            if slot in self._fresh:
                self._fresh.remove(slot)
                request = self.owner(slot)
                found[row], request.unreported_prompt = request.unreported_prompt, 0
        return found
