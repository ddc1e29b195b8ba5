"""The open requests, by the numbers and ids that their clients use."""

import asyncio
from collections import Counter

from pagewire.errors import MAX_QUOTED_NAME, Code, RequestError, quoted
from pagewire.scheduler import metrics
from pagewire.scheduler.core.sequence import State
from pagewire.scheduler.requests.beam_request import BeamRequest
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.open_request import Request
from pagewire.v1 import inference_pb2 as pb


class OpenRequests:
    """The requests that have not ended, by client and stream number, and by id."""

    def __init__(self) -> None:
        # Set while no request is open.
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        # Open requests that are being parsed, and those that are beam searches.
        self.num_parsing = 0
        self.num_searches = 0
        self._by_stream: dict[tuple[int, int], Request] = {}
        self._by_id: dict[str, dict[str, Request]] = {}  # then by owner

    def __len__(self) -> int:
        return len(self._by_stream)

    def conflict(self, request: Request) -> RequestError | None:
        """The error of a request whose stream number or id another open request has."""
        if (id(request.buffer), request.stream) in self._by_stream:
            return RequestError(
                Code.INVALID_ARGUMENT, f"stream {request.stream} is in use; choose a free number"
            )
        if request.owner in self._by_id.get(request.request_id, ()):
            return RequestError(
                Code.INVALID_ARGUMENT,
                f"request_id {quoted(request.request_id, MAX_QUOTED_NAME)} is running already; "
                "choose another",
                "request_id",
            )
        return None

    def add(self, request: Request) -> None:
        """Opens a request that has no conflict."""
        self._by_stream[id(request.buffer), request.stream] = request
        self._by_id.setdefault(request.request_id, {})[request.owner] = request
        self.all_closed.clear()

    def begin_parsing(self, request: Request, task: asyncio.Task[None]) -> None:
        """Notes that `task` parses the request; it is cancelled if the request ends before."""
        request.parsing = task
        self.num_parsing += 1

    def end_parsing(self, request: Request) -> None:
        """Notes that the request is parsed, or cannot be; a second call does nothing."""
        if request.parsing is not None:
            request.parsing = None
            self.num_parsing -= 1

    def begin_search(self, request: Request, beams: BeamRequest) -> None:
        """Makes an open request a beam search."""
        request.beams = beams
        self.num_searches += 1

    def at(self, buffer: DeltaBuffer, stream: int) -> Request | None:
        """The request of a client's stream number."""
        return self._by_stream.get((id(buffer), stream))

    def named(self, request_id: str, owner: str | None = None) -> list[Request]:
        """The requests with an id, of one owner or of all."""
        found = self._by_id.get(request_id, {})
        return [r for name, r in found.items() if owner is None or name == owner]

    def of(self, buffer: DeltaBuffer) -> list[Request]:
        """The requests of a client."""
        return [request for request in self._by_stream.values() if request.buffer is buffer]

    def of_gateways(self) -> list[Request]:
        """The requests whose clients continue them elsewhere."""
        return [request for request in self._by_stream.values() if request.buffer.moves]

    def are_all_of(self, buffer: DeltaBuffer) -> bool:
        """Whether no other client has an open request."""
        return all(request.buffer is buffer for request in self._by_stream.values())

    def by_client(self) -> Counter[int]:
        """The number of requests of each client, by the `id` of its buffer."""
        return Counter(client for client, _ in self._by_stream)

    def in_state(self, state: State) -> int:
        """The number of requests with a sequence in a state; may be called on any thread."""
        requests = list(self._by_stream.values())  # one operation under the interpreter's lock
        return sum(any(s.state is state for s in r.sequences) for r in requests)

    def close(self, request: Request, state: State, finish: pb.Finish) -> None:
        """Ends a request and sends its end; its sequences must not run any more."""
        request.open = False
        if request.deadline is not None:
            request.deadline.cancel()
        if request.parsing is not None:
            request.parsing.cancel()
            self.end_parsing(request)
        self.num_searches -= request.beams is not None
        self._remove(request)
        metrics.REQUESTS.labels(state.name.lower()).inc()
        metrics.FINISHED.labels(_reason(state, finish)).inc()
        finish.resumes = sum(sequence.num_resumes for sequence in request.sequences)
        finish.preemptions = sum(sequence.num_preemptions for sequence in request.sequences)
        completion_tokens = 0
        if request.beams is not None:
            finish.usage.CopyFrom(request.beams.usage())
        elif request.sequence is not None:
            request.sequence.state = state
            completion_tokens = len(request.sequence.output)
            finish.usage.prompt_tokens = len(request.sequence.prompt)
            finish.usage.completion_tokens = completion_tokens
            finish.usage.cached_tokens = request.sequence.cached_tokens or 0
            if request.sequence.prediction is not None:
                finish.usage.accepted_prediction_tokens = request.sequence.accepted_prediction
                finish.usage.rejected_prediction_tokens = request.sequence.rejected_prediction
            if request.sequence.sampling.logprobs is not None:
                finish.cumulative_logprob = request.cumulative_logprob
        if request.queue_seconds is not None:
            finish.queue_seconds = request.queue_seconds
        rest = "" if request.beams is not None else request.flush(finish)
        request.buffer.add_finish(request.stream, finish, completion_tokens, rest)

    def _remove(self, request: Request) -> None:
        del self._by_stream[id(request.buffer), request.stream]
        same_id = self._by_id[request.request_id]
        del same_id[request.owner]
        if not same_id:
            del self._by_id[request.request_id]
        if not self._by_stream:
            self.all_closed.set()


def _reason(state: State, finish: pb.Finish) -> str:
    if finish.reason == pb.FINISH_REASON_ERROR:
        handed_back = state is State.CANCELLED
        return metrics.HANDED_BACK_REASON if handed_back else "error"
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
