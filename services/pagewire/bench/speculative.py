"""Speculation on recorded texts: the output of each prompt is forced, see forced_texts.py.

So drafts are accepted as in real text, with any weights, and the workers do all work of serving.
Clients send one request after another over a gRPC stream to a scheduler.
"""

import asyncio
import json
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.ports import free_port, reachable_host
from pagewire.cli.launch.stack import Stack, control_settings, control_stack
from pagewire.cli.settings.settings import Setting
from pagewire.models import resolve_model, resolve_tokenizer
from pagewire.packing import unpack_unsigned
from pagewire.rpc.credentials import NO_CREDENTIALS, SCHEDULER_TOKEN, read_token
from pagewire.tokenizer_conversion import tokenizer_file

# The mode with additional drafts from the texts' own predictions.
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One line of the file, as tokens. `prediction` is a client's guess of the output, or empty."""

    kind: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    prediction: str


@dataclass(frozen=True, slots=True)
class SpeculativeLoad:
    """The load of all cases; a case is a kind of text with a number of clients."""

    clients: Sequence[int]
    rounds: int
    # The minimum number of requests for each client of a case.
    each: int


@dataclass(slots=True)
class SpeculativeResult:
    """A case: medians over the rounds, and sums of drafts by drafter.

    `tokens_per_second` is the rate of all clients together, `stream_tokens_per_second` that of one
    client from its first token on. `tokens_per_step` is for one sequence.
    """

    kind: str
    clients: int
    mode: str
    tokens_per_second: float
    stream_tokens_per_second: float
    tokens_per_step: float
    drafted: dict[str, int]
    accepted: dict[str, int]

    @property
    def acceptance(self) -> float:
        """The accepted share of the drafts."""
        return sum(self.accepted.values()) / max(1, sum(self.drafted.values()))


@dataclass(slots=True)
class _Stream:
    """The output of one request so far."""

    text: RecordedText
    done: "asyncio.Future[Any]"
    tokens: bytearray = field(default_factory=bytearray)
    deltas: int = 0
    first: float = 0.0
    last: float = 0.0


def speculative_settings() -> dict[str, Setting]:
    """The settings of the stack; the defaults are random weights and speculation."""
    found = {name: s for name, s in control_settings().items() if name != "forced_texts"}
    for name, default in (("load_format", "dummy"), ("speculate", "suffix")):
        found[name] = replace(found[name], default=default)
    return found


def read_texts(path: Path, model: str, tokenizer: str | None) -> list[RecordedText]:
    """The texts of a file by the model's tokenizer; CommandError names a line without a text."""
    from tokenizers import Tokenizer  # here, so that other commands start faster

    try:
        folder = resolve_tokenizer(model, tokenizer) or resolve_model(model)
        encoder = Tokenizer.from_file(str(tokenizer_file(folder)))
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CommandError(f"--replay {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--replay {path}: is not UTF-8 text; convert it: {error}") from error
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            given = json.loads(line)
            prompt, continuation = (
                tuple(encoder.encode(given[name], add_special_tokens=special).ids)
                for name, special in (("prompt", True), ("continuation", False))
            )
            if not prompt or not continuation:
                raise ValueError("prompt or continuation is empty")
            kind, prediction = given.get("kind", "text"), given.get("prediction", "")
            if not isinstance(kind, str) or not isinstance(prediction, str):
                raise TypeError("kind and prediction must be strings")
            texts.append(RecordedText(kind, prompt, continuation, prediction))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(
                f'{path}, line {number}: not {{"prompt": "...", "continuation": "..."}}: {error!r}'
            ) from error
    outputs = defaultdict(set)
    for text in texts:
        outputs[text.prompt].add(text.continuation)
    if not texts or max(map(len, outputs.values())) > 1:
        raise CommandError(f"--replay {path}: holds no text, or two for one prompt")
    return texts


def measure_speculative(
    values: Mapping[str, Any],
    texts: Sequence[RecordedText],
    load: SpeculativeLoad,
    baseline: bool,
) -> list[SpeculativeResult] | None:
    """Runs all cases without speculation, if `baseline`, then with the speculation of `values`.

    CommandError if an output is not the recorded text. None if the run was interrupted.
    """
    results: list[SpeculativeResult] = []
    with TemporaryDirectory(prefix="pagewire-") as folder:
        forced = Path(folder) / "forced.jsonl"
        forced.write_text("".join(_forced_line(text) for text in texts))
        for speculate in ("none", values["speculate"]) if baseline else (values["speculate"],):
            modes = ["none"]
            if speculate != "none":
                modes = [speculate]
                if any(text.prediction for text in texts):
                    modes.append(PREDICTION)
            port = values["scheduler_metrics_port"] or free_port()
            metrics = f"http://{reachable_host(values['metrics_host'])}:{port}/metrics"
            own = {
                **values,
                "speculate": speculate,
                "forced_texts": str(forced),
                "scheduler_metrics_port": port,
            }
            if PREDICTION not in modes:
                own |= {"skip_tokenizer": True, "tokenizer": None}
            token = read_token(values["scheduler_token_file"], SCHEDULER_TOKEN)

            async def measure(
                stack: Stack,
                modes: Sequence[str] = modes,
                metrics: str = metrics,
                token: str | None = token,
            ) -> list[SpeculativeResult]:
                client = _Client(stack.grpc_address, metrics, token)
                return await client.measure(texts, load, modes)

            found = launch(control_stack, own, quiet, measure)
            if found is None:
                return None
            results += found
    return results


def _forced_line(text: RecordedText) -> str:
    line = {"prompt_token_ids": text.prompt, "token_ids": text.continuation}
    return json.dumps(line) + "\n"


class _Client:
    """Clients of one scheduler, over one stream."""

    def __init__(self, address: str, metrics: str, token: str | None) -> None:
        """`metrics` is the URL of the scheduler's metrics."""
        self._address = address
        self._metrics = metrics
        self._token = token
        self._streams: dict[int, _Stream] = {}
        self._numbers = 0
        self._writing = asyncio.Lock()

    async def measure(
        self, texts: Sequence[RecordedText], load: SpeculativeLoad, modes: Sequence[str]
    ) -> list[SpeculativeResult]:
        """Runs every kind, number of clients and mode."""
        from pagewire.rpc.checksums import MULTIPLEX, open_stream
        from pagewire.rpc.transport import open_channel

        async with open_channel(self._address) as channel:
            metadata = NO_CREDENTIALS.with_token(self._token).metadata
            self._call = open_stream(channel, MULTIPLEX, metadata)
            reading = asyncio.create_task(self._read())
            results = []
            for kind in dict.fromkeys(text.kind for text in texts):
                of_kind = [text for text in texts if text.kind == kind]
                for clients in load.clients:
                    for mode in modes:
                        if mode != PREDICTION or any(text.prediction for text in of_kind):
                            case = self._case(kind, of_kind, clients, mode, load)
                            results.append(await case)
            await self._call.done_writing()
            reading.cancel()
        return results

    async def _case(
        self, kind: str, texts: list[RecordedText], clients: int, mode: str, load: SpeculativeLoad
    ) -> SpeculativeResult:
        count = max(load.each * clients, min(len(texts), load.each * 8))
        chosen = [texts[number % len(texts)] for number in range(count)]
        rates, own_rates, steps = [], [], []
        before: dict[tuple[str, str], float] = {}
        for number in range(-1, load.rounds):  # the first round warms up
            if number == 0:
                before = await asyncio.to_thread(self._drafts)
            waiting = list(reversed(chosen[: clients if number < 0 else count]))
            begun = time.perf_counter()
            # Each client has its own salt: other clients may have the same text.
            names = [f"{kind}/{mode}/{clients}/{number}/{client}" for client in range(clients)]
            done = await asyncio.gather(*(self._run(waiting, name, mode) for name in names))
            seconds = time.perf_counter() - begun
            streams = [stream for each in done for stream in each]
            if number < 0:
                continue
            tokens = sum(len(stream.text.continuation) for stream in streams)
            rates.append(tokens / seconds)
            decoding = sum(stream.last - stream.first for stream in streams)
            own_rates.append((tokens - len(streams)) / max(decoding, 1e-9))
            steps.append(tokens / sum(stream.deltas for stream in streams))
        after = await asyncio.to_thread(self._drafts)
        counted = {key: int(after[key] - before.get(key, 0)) for key in after}
        accepted = Counter({name: n for (name, what), n in counted.items() if what == "accepted"})
        rejected = Counter({name: n for (name, what), n in counted.items() if what == "rejected"})
        return SpeculativeResult(
            kind,
            clients,
            mode,
            median(rates),
            median(own_rates),
            median(steps),
            dict(accepted + rejected),
            dict(accepted),
        )

    async def _run(self, waiting: list[RecordedText], salt: str, mode: str) -> list[_Stream]:
        """Runs one client on the waiting texts; returns the streams of its own texts."""
        done = []
        while waiting:
            text = waiting.pop()
            stream = _Stream(text, asyncio.get_running_loop().create_future())
            self._numbers += 1
            self._streams[self._numbers] = stream
            submit = _submit(self._numbers, text, salt, mode)
            async with self._writing:  # a stream accepts one message at a time
                await self._call.write(submit)
            finish = await stream.done
            if finish.error.message:
                raise CommandError(f"a request failed: {finish.error.message}")
            if stream.tokens != _packed(text.continuation):
                raise CommandError("an output is not the recorded text: the worker does not force")
            done.append(stream)
        return done

    async def _read(self) -> None:
        """Reads until the stream ends, then fails the open requests."""
        try:
            await self._read_messages()
            error = CommandError(f"the scheduler ended: {await self._call.details()}")
        except Exception as raised:
            error = CommandError(f"the scheduler's stream broke: {raised}")
        for stream in self._streams.values():
            stream.done.set_exception(error)

    async def _read_messages(self) -> None:
        from pagewire.rpc.checksums import receive
        from pagewire.v1 import inference_pb2 as pb

        while True:
            message = await receive(self._call)
            if not isinstance(message, pb.MultiplexResponse):
                return
            now = time.perf_counter()
            numbers = unpack_unsigned(message.streams).tolist()
            counts = list(message.token_counts) or [1] * len(numbers)
            ids, at = message.token_ids, 0
            for number, tokens in zip(numbers, counts, strict=True):
                stream = self._streams[number]
                stream.tokens += ids[at : at + 4 * tokens]
                at += 4 * tokens
                if stream.last != now:  # the tokens of a step arrive in one message
                    stream.deltas += 1
                stream.first = stream.first or now
                stream.last = now
            for ended in message.finished:
                self._streams.pop(ended.stream).done.set_result(ended.finish)

    def _drafts(self) -> dict[tuple[str, str], float]:
        """The scheduler's drafts so far, by drafter and outcome."""
        with urllib.request.urlopen(self._metrics) as page:
            text = page.read().decode()
        return {
            (sample.labels["drafter"], sample.labels["outcome"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pagewire_scheduler_drafts_total"
        }


def _packed(tokens: Sequence[int]) -> bytes:
    from pagewire.packing import pack

    return pack(tokens)


def _submit(number: int, text: RecordedText, salt: str, mode: str) -> Any:
    from pagewire.v1 import inference_pb2 as pb

    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=text.prompt),
        sampling=pb.SamplingParams(temperature=0, top_p=1, top_k=0, repetition_penalty=1),
        stop=pb.StopConditions(max_tokens=len(text.continuation), ignore_eos=True),
        cache_salt=salt,
        detokenize=False,
    )
    if mode == PREDICTION and text.prediction:
        request.prediction = text.prediction
    return pb.MultiplexRequest(submit=pb.Submit(stream=number, request=request.SerializeToString()))
