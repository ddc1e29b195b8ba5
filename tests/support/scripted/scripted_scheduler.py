"""A scheduler without a model, which follows inference.proto by a script.

A token is a function of prompt, seed and index, so tests can check resumed requests. Words of the
prompt control it: `fail=CODE` and `fail_at=INDEX` end the request with an error, `stop_at=INDEX`
with a stop string, `abort_at=INDEX` as aborted, `twice=INDEX` repeats a delta, `skip=INDEX` omits
one, `mute=INDEX` omits a token's log probabilities, `scores=0` refuses them.

`python scripted_scheduler.py --step 0.01` runs it as a process and prints the port.
"""

import argparse
import asyncio
import contextlib
import math
import uuid
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import uvloop

from pagewire.cli.launch.ports import free_port
from pagewire.packing import pack, pack_floats, pack_unsigned
from pagewire.rpc.checksums import ChecksumInterceptor
from pagewire.rpc.transport import SERVER_OPTIONS, bind
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc

MODEL = "scripted"
STOP_STRING = "END"


def token_at(prompt: str, seed: int, index: int) -> int:
    """The token at an index of an answer."""
    return zlib.crc32(f"{prompt}|{seed}|{index}".encode()) % 32000


def text_at(token: int, index: int) -> str:
    """The text that a token completes; of five tokens the last two make one character."""
    return {3: "", 4: "🙂"}.get(index % 5, f" w{token % 1000}")


def candidates_at(prompt: str, seed: int, index: int, top: int) -> list[tuple[int, float, bytes]]:
    """Id, log probability and bytes of the token and of the likeliest tokens.

    The last of them has the log probability -inf. A token that begins a character has its first
    bytes.
    """
    token = token_at(prompt, seed, index)
    data = text_at(token, index).encode()
    if index % 5 in (3, 4):
        smiley = "🙂".encode()
        data = smiley[:2] if index % 5 == 3 else smiley[2:]
    likeliest = [(token + rank, -rank / 4, f" t{rank}".encode()) for rank in range(top)]
    likeliest[-1:] = [(id_, -math.inf, data) for id_, _, data in likeliest[-1:]]
    return [(token, -0.5 - index / 64 - token % 8 / 8, data), *likeliest]


def expected_text(prompt: str, seed: int, tokens: int) -> str:
    """The text of an answer of `tokens` tokens."""
    text = "".join(text_at(token_at(prompt, seed, i), i) for i in range(tokens))
    return text + ("\ufffd" if tokens % 5 == 4 else "")


@dataclass
class Run:
    """An open request."""

    request: pb.GenerateRequest
    prompt: str
    done: int

    @property
    def script(self) -> dict[str, int]:
        """The `name=number` words of the prompt."""
        pairs = (word.partition("=") for word in self.prompt.split() if "=" in word)
        return {name: int(value) for name, _, value in pairs if value.isdigit()}

    @property
    def max_tokens(self) -> int:
        """The number of tokens to generate."""
        stop = self.request.stop
        limit = stop.max_tokens if stop.HasField("max_tokens") else 32
        return min(limit, self.script.get("stop_at", limit))

    def usage(self) -> pb.Usage:
        """The tokens so far."""
        words = len(self.prompt.split())
        return pb.Usage(prompt_tokens=words, completion_tokens=self.done, cached_tokens=words // 2)

    def token(self, index: int) -> int:
        """The token at an index."""
        return token_at(self.prompt, self.request.sampling.seed, index)

    def finish(self) -> pb.Finish | None:
        """The end of the answer, or None before it."""
        script, usage = self.script, self.usage()
        if script.get("scores") == 0 and self.request.HasField("logprobs"):
            error = pb.Error(code=3, message="logprobs is not possible", field="logprobs")
            return pb.Finish(reason=pb.FINISH_REASON_ERROR, error=error, usage=usage)
        if "fail" in script and self.done >= script.get("fail_at", 0):
            error = pb.Error(code=script["fail"], message="scripted failure", field="prompt")
            failed = pb.Finish(reason=pb.FINISH_REASON_ERROR, error=error, usage=usage)
            if self.done:  # otherwise it was never admitted
                failed.queue_seconds = 0.25
            return failed
        if "abort_at" in script and self.done >= script["abort_at"]:
            return pb.Finish(reason=pb.FINISH_REASON_ABORT, usage=usage)
        if self.done < self.max_tokens:
            return None
        if "stop_at" in script:
            return pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string=STOP_STRING, usage=usage)
        return pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage, queue_seconds=0.25)


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class ScriptedScheduler(inference_pb2_grpc.InferenceServicer):
    """One token of every open request each `step` seconds, in one message."""

    step: float = 0.001
    model: str = MODEL
    waiting: int = 0  # reported waiting requests; running ones are counted
    ready_workers: int = 1
    draining: bool = False
    read: int | None = None  # the number of read messages that it reports
    mute: bool = False  # sends nothing, but keeps its streams open
    full_for: float | None = None  # refuses all requests, with this retry time in seconds
    retry_after: int = 0  # reported seconds: it would refuse new requests
    unable: bool = False  # hands all requests back, as if its workers could not run them
    knows_model: bool = True
    instance: str = ""  # id of the process; a new one at each start
    grants: bool = True  # accepts reservations
    tells: pb.WorkerLosses | None = None  # reported with requests that it hands back
    told: list[int] = field(default_factory=list)  # lost workers of each submitted request
    deadly: str = ""  # prompts with this beginning end its process
    deaths: int = 0
    reborn_after: float = 0.1
    open_at_death: list[int] = field(default_factory=list)  # open requests at each end
    reservation_changes: int = 0
    submitted: list[pb.GenerateRequest] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)  # for each submitted request
    aborted: list[str] = field(default_factory=list)
    used: dict[str, pb.Usage] = field(default_factory=dict)  # by id, of requests that have ended
    calls: list[bytes] = field(default_factory=list)  # serialized requests of unary methods
    call_gate: asyncio.Event = field(default_factory=_open_gate)  # unary calls wait for it
    running: int = 0
    streams: int = 0
    _holder: Any = None
    _reserving: list[tuple[dict[int, Run], list[pb.StreamFinish]]] = field(default_factory=list)
    _address: str = ""
    _dying: "asyncio.Task[None] | None" = None
    _server: Any = None

    async def start(self, address: str | None = None) -> str:
        """Listens, by default on a port that it can use again; returns the address."""
        address = address or f"127.0.0.1:{free_port()}"
        self.instance = self.instance or uuid.uuid4().hex
        self.reservation_changes, self._holder, self._reserving = 0, None, []
        self._address = address
        self._server = grpc.aio.server(interceptors=[ChecksumInterceptor()], options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        bind(self._server, [address])
        await self._server.start()
        return address

    async def stop(self) -> None:
        """Breaks every stream; at the next start it is another process."""
        await self.cut()
        self.instance = ""

    async def die(self) -> None:
        """Ends, and starts again as another process."""
        self.deaths += 1
        self.open_at_death.append(self.running)
        await self.stop()
        await asyncio.sleep(self.reborn_after)
        await self.start(self._address)

    async def cut(self) -> None:
        """Breaks every stream; the process continues."""
        await self._server.stop(None)

    async def Multiplex(  # noqa: N802
        self, requests: AsyncIterator[pb.MultiplexRequest], context: Any
    ) -> None:
        """One gateway's stream."""
        open_runs: dict[int, Run] = {}
        ended: list[pb.StreamFinish] = []
        self.streams += 1
        reader = asyncio.create_task(self._read(requests, open_runs, ended))
        try:
            await self._write(context, open_runs, ended, reader)
        finally:
            reader.cancel()
            self._end_reservation(open_runs)
            self.streams -= 1
            self.running -= len(open_runs)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Any
    ) -> pb.TokenizeResponse:
        """A token for each byte of the text, or of the messages."""
        await self._before_call(request.SerializeToString())
        text = request.text or "".join(message.content for message in request.chat.messages)
        names = list(text) if request.return_token_strs else []
        return pb.TokenizeResponse(token_ids=text.encode(), token_strs=names)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        """The reverse of Tokenize."""
        await self._before_call(request.SerializeToString())
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def _before_call(self, request: bytes) -> None:
        self.calls.append(request)
        await self.call_gate.wait()

    async def _read(
        self,
        requests: AsyncIterator[pb.MultiplexRequest],
        open_runs: dict[int, Run],
        ended: list[pb.StreamFinish],
    ) -> None:
        async for message in requests:
            if message.HasField("submit"):
                self._submit(message.submit, open_runs, ended)
            elif message.abort in open_runs:
                self.running -= 1
                run = open_runs.pop(message.abort)
                self.aborted.append(run.request.request_id)
                self.used[run.request.request_id] = run.usage()
                finish = pb.Finish(
                    reason=pb.FINISH_REASON_ABORT, usage=run.usage(), queue_seconds=0.25
                )
                ended.append(pb.StreamFinish(stream=message.abort, finish=finish))
            elif message.WhichOneof("message") == "reserve":
                if not message.reserve or not self.grants:
                    self._end_reservation(open_runs)
                elif self._holder is not open_runs:
                    self._reserving.append((open_runs, ended))
                    self._begin_reservation()

    def _begin_reservation(self) -> None:
        """Reserves the scheduler for the first gateway in the queue, if it is free."""
        if self._holder is None and self._reserving:
            self._holder, ended = self._reserving.pop(0)
            self.reservation_changes += 1
            self._hand_back(self._holder, ended)

    def _end_reservation(self, gateway: dict[int, Run]) -> None:
        """Ends the reservation of a gateway, or its wait for one."""
        self._reserving = [other for other in self._reserving if other[0] is not gateway]
        if self._holder is gateway:
            self._holder = None
            self.reservation_changes += 1
            # Other gateways see a free scheduler before the next one reserves it.
            asyncio.get_running_loop().call_later(10 * self.step, self._begin_reservation)

    def _submit(
        self, submit: pb.Submit, open_runs: dict[int, Run], ended: list[pb.StreamFinish]
    ) -> None:
        assert submit.stream not in open_runs, "a stream number in use was given again"
        request = pb.GenerateRequest.FromString(submit.request)
        self.submitted.append(request)
        self.moved.append(submit.moved)
        self.told.append(submit.worker_losses.workers)
        run = Run(request, _prompt(request), len(request.resume_token_ids))
        resumed = [run.token(i) for i in range(run.done)]
        assert list(request.resume_token_ids) == resumed, "resumed from tokens that were not sent"
        if self._holder is open_runs:
            self._hand_back(open_runs, ended)
        excluded = self._holder is not None and self._holder is not open_runs
        if self.draining or self.full_for or self.unable or excluded:
            error = pb.Error(code=14, message="the scheduler drains, or has no worker for it")
            if self.full_for:
                milliseconds = int(1000 * self.full_for)
                error = pb.Error(code=8, message="full", retry_after_ms=milliseconds)
            finish = pb.Finish(reason=pb.FINISH_REASON_ERROR, error=error)
            ended.append(pb.StreamFinish(stream=submit.stream, finish=finish))
            return
        open_runs[submit.stream] = run
        self.running += 1
        dying = self._dying is not None and not self._dying.done()
        if self.deadly and run.prompt.startswith(self.deadly) and not dying:
            self._dying = asyncio.create_task(self.die())

    async def _write(
        self,
        context: Any,
        open_runs: dict[int, Run],
        ended: list[pb.StreamFinish],
        reader: "asyncio.Task[None]",
    ) -> None:
        first, load, load_at = True, None, 0.0
        while not reader.done():
            if self.mute:
                await asyncio.sleep(self.step)
                continue
            response = self._step_of(open_runs)
            if self.unable or (self._holder is not None and self._holder is not open_runs):
                self._hand_back(open_runs, ended)
            response.finished.extend(ended)
            ended.clear()
            if first:
                response.instance_id = self.instance
                response.models.SetInParent()
                if self.knows_model:
                    response.models.models.add(
                        id=self.model, created=1, max_model_len=4096, root="/models/a"
                    )
            now = asyncio.get_running_loop().time()
            if now - load_at >= 0.1 and (self.read is not None or self._load() != load):
                load, load_at = self._load(), now
                response.load.CopyFrom(load)
                if self.read is not None:
                    response.received = self.read
            response.draining = self.draining
            response.reservation_changes = self.reservation_changes
            response.reserved = self._holder is open_runs
            first = False
            await context.write(response)
            await asyncio.sleep(self.step)

    def _hand_back(self, open_runs: dict[int, Run], ended: list[pb.StreamFinish]) -> None:
        error = pb.Error(code=14, message="no worker is left")
        for stream in open_runs:
            finish = pb.Finish(reason=pb.FINISH_REASON_ERROR, error=error)
            finish.worker_losses.MergeFrom(self.tells or pb.WorkerLosses())
            ended.append(pb.StreamFinish(stream=stream, finish=finish))
        self.running -= len(open_runs)
        open_runs.clear()

    def _load(self) -> pb.Load:
        return pb.Load(
            running=self.running,
            waiting=self.waiting,
            used_blocks=25,
            total_blocks=100,
            preemptions=7,
            ready_workers=self.ready_workers,
            retry_after_seconds=self.retry_after,
        )

    def _step_of(self, open_runs: dict[int, Run]) -> pb.MultiplexResponse:
        response = pb.MultiplexResponse()
        tokens: list[int] = []
        texts: list[bytes] = []
        candidates: list[tuple[int, float, bytes]] = []
        for stream, run in list(open_runs.items()):
            if self.deadly and run.prompt.startswith(self.deadly):
                continue  # the process ends before the first token
            finish = run.finish()
            if finish is None:
                self._delta(response, stream, run, tokens, texts, candidates)
                finish = run.finish()
            if finish is not None:
                if run.done % 5 == 4:  # half a character is left
                    _entry(response, stream, run.done, 0, "\ufffd".encode(), 0, texts)
                response.finished.add(stream=stream, finish=finish)
                if run.done:
                    self.used[run.request.request_id] = run.usage()
                del open_runs[stream]
                self.running -= 1
        response.token_ids = pack(tokens)
        response.text = b"".join(texts)
        entries = len(response.token_counts)
        if set(response.token_counts) == {1}:
            del response.token_counts[:]
        if not any(response.prompt_tokens):
            del response.prompt_tokens[:]
        if candidates:
            missing = entries - len(response.candidate_counts)
            response.candidate_counts.extend([0] * missing)
            response.candidate_ids = pack([token for token, _, _ in candidates])
            values = np.array([value for _, value, _ in candidates], np.float32)
            response.candidate_logprobs = pack_floats(values)
            response.candidate_sizes.extend(len(data) for _, _, data in candidates)
            response.candidate_bytes = b"".join(data for _, _, data in candidates)
        else:
            del response.candidate_counts[:]
        return response

    def _delta(
        self,
        response: pb.MultiplexResponse,
        stream: int,
        run: Run,
        tokens: list[int],
        texts: list[bytes],
        candidates: list[tuple[int, float, bytes]],
    ) -> None:
        index = run.done
        if index == len(run.request.resume_token_ids) and run.request.return_prompt_token_ids:
            response.prompts.add(stream=stream, token_ids=pack(prompt_ids(run.prompt)))
        run.done += 1
        if run.script.get("skip") == index:
            return
        token = run.token(index)
        text = text_at(token, index).encode()
        first = index == len(run.request.resume_token_ids)
        for _ in range(2 if run.script.get("twice") == index else 1):
            tokens.append(token)
            prompt_tokens = len(run.prompt.split()) if first else 0
            _entry(response, stream, index, 1, text, prompt_tokens, texts)
            if run.request.HasField("logprobs") and run.script.get("mute") != index:
                top = run.request.logprobs
                its_own = candidates_at(run.prompt, run.request.sampling.seed, index, top)
                missing = len(response.token_counts) - 1 - len(response.candidate_counts)
                response.candidate_counts.extend([0] * missing + [len(its_own)])
                candidates += its_own


def prompt_ids(prompt: str) -> list[int]:
    """The tokens of a prompt: a token for each word."""
    return [int(word) if word.isdigit() else len(word) for word in prompt.split()]


def _entry(
    response: pb.MultiplexResponse,
    stream: int,
    index: int,
    count: int,
    text: bytes,
    prompt_tokens: int,
    texts: list[bytes],
) -> None:
    response.streams += pack_unsigned([stream])
    response.indices += pack_unsigned([index])
    response.token_counts.append(count)
    response.text_sizes += pack_unsigned([len(text)])
    response.prompt_tokens.append(prompt_tokens)
    texts.append(text)


def _prompt(request: pb.GenerateRequest) -> str:
    kind = request.WhichOneof("input")
    if kind == "chat":
        return str(request.chat.messages[-1].content)
    if kind == "prompt_token_ids":
        return " ".join(map(str, request.prompt_token_ids.ids))
    return str(request.prompt)


async def _main(address: str | None, step: float) -> None:
    print((await ScriptedScheduler(step=step).start(address)).rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--step", type=float, default=0.01)
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_main(arguments.address, arguments.step))
