"""All requests at once, over one gRPC stream to a scheduler."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, control_stack
from pagewire.cli.settings.settings import Setting
from pagewire.rpc.credentials import NO_CREDENTIALS, SCHEDULER_TOKEN, read_token


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the file of requests."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class OfflineSampling:
    """The sampling of all requests. Without `detokenize` the scheduler makes no text."""

    temperature: float
    ignore_eos: bool
    detokenize: bool


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """The figures of a run. `seconds` is from the first submission to the last finish. The
    scheduler counts the tokens of successful requests."""

    requests: int
    failed: int
    first_error: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens a second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def without_wait_limit(settings: dict[str, Setting]) -> dict[str, Setting]:
    """The same settings, but by default a request may wait without limit."""
    waiting = replace(settings["max_waiting_seconds"], default=math.inf)
    return {**settings, "max_waiting_seconds": waiting}


def measure_offline(
    values: Mapping[str, Any], requests: list[Request], sampling: OfflineSampling
) -> tuple[float, OfflineResult] | None:
    """Starts workers and a scheduler, submits all requests at once and ends the processes.

    `values` are the settings of `control_settings`. Returns the seconds until all processes were
    ready, and the result; None when the run was interrupted.
    """
    started = time.perf_counter()

    async def measure(stack: Stack) -> tuple[float, OfflineResult]:
        start_to_ready = time.perf_counter() - started
        token = read_token(values["scheduler_token_file"], SCHEDULER_TOKEN)
        return start_to_ready, await submit_all(stack.grpc_address, requests, sampling, token)

    return launch(control_stack, values, quiet, measure)


def read_requests(path: Path) -> list[Request]:
    """The requests of a file; CommandError names a line that is not a request."""
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CommandError(f"--requests {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--requests {path}: is not UTF-8 text; convert it: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(Request(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise CommandError(
                    f'{path}, line {number}: not {{"prompt_token_ids": [...], "max_tokens": n}}: '
                    f"{error}"
                ) from error
    if not requests:
        raise CommandError(f"--requests {path}: holds no request")
    return requests


async def submit_all(
    address: str, requests: list[Request], sampling: OfflineSampling, token: str | None = None
) -> OfflineResult:
    """Runs requests over one Multiplex stream of the scheduler at `address`.

    CommandError if the stream ends before all requests have."""
    from pagewire.rpc.checksums import MULTIPLEX, open_stream, receive
    from pagewire.rpc.transport import open_channel
    from pagewire.v1 import inference_pb2 as pb

    # Built before the clock starts, because this is the client's work.
    messages = [_submit(stream, request, sampling) for stream, request in enumerate(requests)]
    async with open_channel(address) as channel:
        metadata = NO_CREDENTIALS.with_token(token).metadata
        call = open_stream(channel, MULTIPLEX, metadata)
        started = time.perf_counter()
        writer = asyncio.create_task(_write(call, messages))
        finishes: dict[int, pb.Finish] = {}
        while len(finishes) < len(requests):
            message = await receive(call)
            if not isinstance(message, pb.MultiplexResponse):
                raise CommandError(
                    f"the scheduler ended the stream with {len(requests) - len(finishes)} requests "
                    f"unfinished: {await call.details()}"
                )
            finishes.update((ended.stream, ended.finish) for ended in message.finished)
        seconds = time.perf_counter() - started
        await writer
        await call.done_writing()
    return _summarize(list(finishes.values()), seconds)


async def _write(call: Any, messages: list[Any]) -> None:
    for message in messages:
        await call.write(message)


def _submit(stream: int, request: Request, sampling: OfflineSampling) -> Any:
    from pagewire.v1 import inference_pb2 as pb

    return pb.MultiplexRequest(
        submit=pb.Submit(
            stream=stream,
            request=pb.GenerateRequest(
                prompt_token_ids=pb.TokenIds(ids=request.prompt_token_ids),
                sampling=pb.SamplingParams(temperature=sampling.temperature),
                stop=pb.StopConditions(
                    max_tokens=request.max_tokens, ignore_eos=sampling.ignore_eos
                ),
                detokenize=sampling.detokenize,
            ).SerializeToString(),
        )
    )


def _summarize(finishes: list[Any], seconds: float) -> OfflineResult:
    from pagewire.v1 import inference_pb2 as pb

    succeeded = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    good = [finish.usage for finish in finishes if finish.reason in succeeded]
    bad = [finish for finish in finishes if finish.reason not in succeeded]
    return OfflineResult(
        requests=len(finishes),
        failed=len(bad),
        first_error=(bad[0].error.message or "aborted") if bad else None,
        prompt_tokens=sum(usage.prompt_tokens for usage in good),
        cached_tokens=sum(usage.cached_tokens for usage in good),
        output_tokens=sum(usage.completion_tokens for usage in good),
        seconds=seconds,
    )
