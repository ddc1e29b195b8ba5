"""`pagewire bench offline`: all requests at once, without HTTP."""

import asyncio
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, control_settings, control_stack
from pagewire.cli.settings.options import configured
from pagewire.cli.settings.settings import Setting
from pagewire.models import served_name
from pagewire.rpc.credentials import NO_CREDENTIALS, SCHEDULER_TOKEN, read_token


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the file of requests."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """What all requests have in common."""

    temperature: float
    ignore_eos: bool
    detokenize: bool


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """Seconds are from the first submission to the last finish; tokens are as the scheduler
    counted them, of the requests that succeeded."""

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


def with_patience(settings: dict[str, Setting]) -> dict[str, Setting]:
    """The same settings, but requests wait for as long as it takes by default."""
    waiting = replace(settings["max_waiting_seconds"], default=math.inf)
    return {**settings, "max_waiting_seconds": waiting}


@configured(with_patience(control_settings()))
def offline(
    values: dict[str, Any],
    *,
    requests: Annotated[
        Path,
        typer.Option(help='JSON lines: {"prompt_token_ids": [1, 2, 3], "max_tokens": 16}.'),
    ],
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate max_tokens tokens in any case.")
    ] = False,
    no_detokenize: Annotated[
        bool, typer.Option("--no-detokenize", help="Measure token ids only, without text.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Start workers and a scheduler, submit all requests at once over gRPC, measure, end."""
    batch = read_requests(requests)
    sampling = SamplingFlags(temperature, ignore_eos, not no_detokenize)
    values = {**values, "skip_tokenizer": values["skip_tokenizer"] or no_detokenize}
    started = time.perf_counter()

    async def measure(stack: Stack) -> tuple[float, OfflineResult]:
        start_to_ready = time.perf_counter() - started
        token = read_token(values["scheduler_token_file"], SCHEDULER_TOKEN)
        return start_to_ready, await submit_all(stack.grpc_address, batch, sampling, token)

    measured = launch(control_stack, values, quiet, measure)
    if measured is None:
        raise typer.Exit(130)
    start_to_ready, result = measured
    model = served_name(values["model"], values["served_model_name"])
    _report(model, start_to_ready, result)
    if output is not None:
        figures = figures_of(_as_result(start_to_ready, result), model)
        write_rows(output, figures, command_line())
    if result.failed:
        raise CommandError(f"{result.failed} requests failed; the first: {result.first_error}")


def read_requests(path: Path) -> list[Request]:
    """The requests of a file; CommandError names the line that is not one."""
    requests = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise CommandError(f"--requests {path}: cannot be read: {error.strerror}") from error
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
    address: str, requests: list[Request], sampling: SamplingFlags, token: str | None = None
) -> OfflineResult:
    """Runs requests over one Multiplex stream of the scheduler at `address`."""
    from pagewire.rpc.checksums import MULTIPLEX, open_stream, receive
    from pagewire.rpc.transport import open_channel
    from pagewire.v1 import inference_pb2 as pb

    # Built before the clock starts: this is the client's work, not the engine's.
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


def _submit(stream: int, request: Request, sampling: SamplingFlags) -> Any:
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


def _report(model: str, start_to_ready: float, result: OfflineResult) -> None:
    print(
        f"{model}: {result.requests} requests, {result.failed} failed\n"
        f"  start to ready    {start_to_ready:10.2f} s\n"
        f"  wall time         {result.seconds:10.2f} s\n"
        f"  prompt tokens     {result.prompt_tokens:10,} ({result.cached_tokens:,} cached)\n"
        f"  output tokens     {result.output_tokens:10,}\n"
        f"  output throughput {result.output_rate:10,.1f} tokens/s\n"
        f"  total throughput  {result.total_rate:10,.1f} tokens/s"
    )


def _as_result(start_to_ready: float, result: OfflineResult) -> dict[str, Any]:
    return {
        "start_to_ready_seconds": start_to_ready,
        **asdict(result),
        "output_tokens_per_second": result.output_rate,
        "total_tokens_per_second": result.total_rate,
    }
