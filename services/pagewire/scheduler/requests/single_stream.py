"""The responses of Generate: a client buffer that has one request only."""

from pagewire.errors import Code, RequestError
from pagewire.packing import unpack, unpack_floats, unpack_unsigned
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.v1 import inference_pb2 as pb


def response_of(
    request: pb.GenerateRequest, news: pb.MultiplexResponse, finish: pb.Finish | None
) -> pb.GenerateResponse:
    """The message for the only request in `news`."""
    response = pb.GenerateResponse(
        request_id=request.request_id,
        index=int(unpack_unsigned(news.indices)[0]) if news.indices else _num_completed(finish),
        token_ids=unpack(news.token_ids).tolist(),
        text=news.text.decode(),
        finish=finish,
    )
    if news.candidate_counts:
        with_bytes = not request.HasField("detokenize") or request.detokenize
        _add_logprobs(response, news, with_bytes)
    return response


def finish_in(buffer: DeltaBuffer) -> pb.Finish:
    """The end of the only request; it must have ended."""
    while buffer.ready.is_set():
        news = buffer.take()
        if news.finished:
            return news.finished[0].finish
    raise AssertionError("the request has not ended")


def request_error(error: pb.Error) -> RequestError:
    """The error of a finish; `error_finish` is its inverse."""
    seconds = error.retry_after_ms / 1000 if error.HasField("retry_after_ms") else None
    return RequestError(Code(error.code), error.message, error.field, seconds)


def _num_completed(finish: pb.Finish | None) -> int:
    return finish.usage.completion_tokens if finish is not None else 0


def _add_logprobs(
    response: pb.GenerateResponse, news: pb.MultiplexResponse, with_bytes: bool
) -> None:
    """Adds the candidates of each token: itself first, then the likeliest."""
    width = max(news.candidate_counts)
    ids = unpack(news.candidate_ids).reshape(-1, width)
    values = unpack_floats(news.candidate_logprobs).reshape(-1, width)
    response.logprobs.extend(values[:, 0].tolist())
    response.top_token_ids.extend(ids[:, 1:].ravel().tolist())
    response.top_logprobs.extend(values[:, 1:].ravel().tolist())
    if not with_bytes:
        return
    at = 0
    for candidate, size in enumerate(news.candidate_sizes):
        data = news.candidate_bytes[at : at + size]
        at += size
        (response.top_token_bytes if candidate % width else response.token_bytes).append(data)
