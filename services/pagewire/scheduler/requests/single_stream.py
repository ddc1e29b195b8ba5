"""The responses of Generate: a client buffer that has one request only."""

from pagewire.errors import Code, RequestError
from pagewire.packing import unpack, unpack_floats, unpack_unsigned
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.v1 import inference_pb2 as pb


def response_of(
    request: pb.GenerateRequest, deltas: pb.MultiplexResponse, finish: pb.Finish | None
) -> pb.GenerateResponse:
    """The message for the only request in `deltas`."""
    response = pb.GenerateResponse(
        request_id=request.request_id,
        index=int(unpack_unsigned(deltas.indices)[0]) if deltas.indices else _num_completed(finish),
        token_ids=unpack(deltas.token_ids).tolist(),
        text=deltas.text.decode(),
        finish=finish,
    )
    if deltas.prompts:
        response.prompt.CopyFrom(deltas.prompts[0])
        response.prompt.ClearField("stream")
    if deltas.candidate_counts:
        with_bytes = not request.HasField("detokenize") or request.detokenize
        _add_logprobs(response, deltas, with_bytes)
    return response


def finish_in(buffer: DeltaBuffer) -> pb.Finish:
    """The end of the only request; it must have ended."""
    while buffer.ready.is_set():
        deltas = buffer.take()
        if deltas.finished:
            return deltas.finished[0].finish
    raise AssertionError("the request has not ended")


def request_error(error: pb.Error) -> RequestError:
    """The error of a finish; `error_finish` is its inverse."""
    seconds = error.retry_after_ms / 1000 if error.HasField("retry_after_ms") else None
    return RequestError(Code(error.code), error.message, error.field, seconds, error.reason)


def _num_completed(finish: pb.Finish | None) -> int:
    return finish.usage.completion_tokens if finish is not None else 0


def _add_logprobs(
    response: pb.GenerateResponse, deltas: pb.MultiplexResponse, with_bytes: bool
) -> None:
    """Adds the candidates of each token: itself first, then the likeliest."""
    width = max(deltas.candidate_counts)
    ids = unpack(deltas.candidate_ids).reshape(-1, width)
    values = unpack_floats(deltas.candidate_logprobs).reshape(-1, width)
    response.logprobs.extend(values[:, 0].tolist())
    response.top_token_ids.extend(ids[:, 1:].ravel().tolist())
    response.top_logprobs.extend(values[:, 1:].ravel().tolist())
    if not with_bytes:
        return
    at = 0
    for candidate, size in enumerate(deltas.candidate_sizes):
        data = deltas.candidate_bytes[at : at + size]
        at += size
        (response.top_token_bytes if candidate % width else response.token_bytes).append(data)
