"""The gateway's process: its metrics, refusals, lost schedulers, and how it drains."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import time

import httpx
import pytest

from pagewire.cli.launch.ports import free_port
from support.processes.gateway_process import (
    GatewayProcess,
    command,
    gateway,
    raw_request,
    ready_gateway,
    scheduler,
)
from support.scripted.scripted_scheduler import ScriptedScheduler, expected_text
from support.waiting import eventually

SEED = 11


async def test_metrics_of_completed_and_refused_requests(
    served: GatewayProcess, http: httpx.AsyncClient, peer: ScriptedScheduler
) -> None:
    body = {"prompt": "a b c", "max_tokens": 6}
    await http.post("/v1/completions", json=body)
    await http.post("/v1/completions", json=body | {"stream": True})
    await http.post("/v1/completions", json={"prompt": []})
    await http.get("/nowhere")
    text = (await http.get(served.metrics_url)).text
    public = (await http.get("/metrics")).text
    assert re.findall("^# .*", public, re.M) == re.findall("^# .*", text, re.M)
    values = dict(re.findall(r"^pagewire_gateway_(\S+) (\S+)$", text, re.MULTILINE))
    route = 'route="/v1/completions"'
    assert values[f'requests_total{{outcome="200",{route}}}'] == "2.0"
    assert values[f'requests_total{{outcome="400",{route}}}'] == "1.0"
    assert values['requests_total{outcome="404",route="other"}'] == "1.0"
    model = '{model="scripted"}'
    assert values[f"prompt_tokens_total{model}"] == "6.0"
    assert values[f"generated_tokens_total{model}"] == "12.0"
    for histogram in ("generation_seconds", "time_to_first_token_seconds"):
        assert values[f"{histogram}_count{model}"] == "2.0"
        assert float(values[f"{histogram}_sum{model}"]) > 0
    assert values[f"time_per_output_token_seconds_count{model}"] == "2.0"
    waits = [values[f"queue_seconds_{part}{model}"] for part in ("count", "sum")]
    assert waits == ["2.0", "0.5"]
    assert values[f"request_seconds_count{{{route}}}"] == "2.0"
    scheduled = re.search(r'kv_utilization\{scheduler="(\S+)"\} 0.25', text)
    assert scheduled is not None
    assert values[f'preemptions_total{{scheduler="{scheduled[1]}"}}'] == "7.0"
    assert values[f'scheduler_ready{{scheduler="{scheduled[1]}"}}'] == "1.0"


async def test_clients_that_leave_are_counted(
    served: GatewayProcess, http: httpx.AsyncClient, peer: ScriptedScheduler
) -> None:
    peer.step = 0.01
    for stream in (False, True):
        _, writer = await raw_request(
            served.url, {"prompt": "x", "stream": stream, "max_tokens": 3000}
        )
        await eventually(lambda: peer.running == 1)
        writer.close()
        await eventually(lambda: peer.running == 0)
    text = (await http.get(served.metrics_url)).text
    assert 'requests_total{outcome="client_gone",route="/v1/completions"} 2.0' in text


async def test_not_ready_without_a_worker(peer: ScriptedScheduler) -> None:
    async with (
        ready_gateway(await peer.start(), resume_timeout=0.5) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        peer.ready_workers = 0
        for _ in range(100):
            if (await http.get("/readyz")).status_code == 503:
                break
            await asyncio.sleep(0.02)
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await http.get("/healthz")).status_code == 200


def test_too_many_open_requests_are_refused_at_once() -> None:
    with scheduler(0.01) as (address, _), gateway(address, max_open_requests=3) as process:
        process.wait_ready()
        asyncio.run(_overload(process))


async def _overload(process: GatewayProcess) -> None:
    body = {"prompt": "x", "max_tokens": 150}
    async with httpx.AsyncClient(base_url=process.url, timeout=20) as http:
        first = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
        await eventually(lambda: process.metric("open_requests") == 3)
        began = time.perf_counter()
        refused = await asyncio.gather(
            *(http.post("/v1/completions", json=body) for _ in range(20))
        )
        assert time.perf_counter() - began < 1
        assert {r.status_code for r in refused} == {429}
        assert {r.json()["error"]["code"] for r in refused} == {"rate_limit_exceeded"}
        assert all(1 <= int(r.headers["retry-after"]) <= 60 for r in refused)
        assert (await http.get("/readyz")).status_code == 200, "a busy gateway is ready"
        assert [r.status_code for r in await asyncio.gather(*first)] == [200] * 3
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        text = (await http.get(process.metrics_url)).text
        assert 'requests_total{outcome="429",route="/v1/completions"} 20.0' in text


async def test_a_request_that_schedulers_would_refuse_is_refused_by_its_head(
    served: GatewayProcess, http: httpx.AsyncClient, peer: ScriptedScheduler
) -> None:
    """Its body is not read, no scheduler gets it, and open requests continue."""
    peer.step = 0.01
    body = {"prompt": "x", "max_tokens": 100}
    running = asyncio.create_task(http.post("/v1/completions", json=body))
    await eventually(lambda: peer.running == 1)
    peer.retry_after = 7
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 30\r\n\r\n"
    )
    status = ""
    for _ in range(100):  # until the gateway has the new load report
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(head)
        try:
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.2)
            status = answer.decode()
        except TimeoutError:
            pass
        writer.close()
        if status:
            break
    assert status.startswith("HTTP/1.1 429 "), status
    assert "retry-after: 7\r\n" in status
    assert (await http.get("/readyz")).status_code == 200, "a busy gateway is ready"
    assert len(peer.submitted) == 1
    assert (await running).status_code == 200
    peer.retry_after = 0
    body["max_tokens"] = 2
    async with asyncio.timeout(10):
        while (await http.post("/v1/completions", json=body)).status_code != 200:
            await asyncio.sleep(0.02)
    text = (await http.get(served.metrics_url)).text
    [within] = re.findall(r'gateway_refusal_seconds_bucket\{le="1.0"\} (\S+)', text)
    assert float(within) >= 1


async def test_a_request_sent_while_the_gateway_starts_is_answered() -> None:
    """As from a client that has not seen a restart."""
    with scheduler(0.001) as (address, _):
        port = free_port()
        log = asyncio.subprocess.DEVNULL
        program = command({"schedulers": address, "port": port})
        process = await asyncio.create_subprocess_exec(*program, stderr=log)
        body = {"prompt": "x", "max_tokens": 3, "seed": SEED}
        try:
            async with httpx.AsyncClient(timeout=20) as http, asyncio.timeout(20):
                while True:
                    try:
                        url = f"http://127.0.0.1:{port}/v1/completions"
                        answer = await http.post(url, json=body)
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.005)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == expected_text("x", SEED, 3)
        finally:
            process.kill()
            await process.wait()


def test_streams_survive_a_killed_scheduler() -> None:
    """One of two is killed with SIGKILL: every stream continues at the other and completes."""
    with (
        scheduler(0.01) as (first, first_process),
        scheduler(0.01) as (second, _),
        gateway(f"{first},{second}") as process,
    ):
        process.wait_ready()
        body = {
            "prompt": [f"prompt {i}" for i in range(8)],
            "stream": True,
            "max_tokens": 120,
            "seed": SEED,
        }
        texts = [""] * 8
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=20) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            for number, line in enumerate(lines):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] += choice["text"]
                if number == 100:
                    first_process.kill()
        assert texts == [expected_text(f"prompt {i}", SEED, 120) for i in range(8)]
        resumed = re.search(r"resumed_total\S* (\d+)", httpx.get(process.metrics_url).text)
        assert resumed is not None
        assert int(resumed[1]) > 0


async def test_a_drain_refuses_new_requests_and_completes_open_ones(
    served: GatewayProcess, peer: ScriptedScheduler
) -> None:
    peer.step = 0.02
    body = {"prompt": "x", "stream": True, "max_tokens": 60, "seed": SEED}
    async with httpx.AsyncClient(base_url=served.url, timeout=20) as http:
        stream = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: peer.running == 1)
        served.process.terminate()
        for _ in range(100):
            ready = await http.get("/readyz")
            if ready.status_code == 503:
                break
            await asyncio.sleep(0.01)
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert refused.headers["x-pagewire-draining"] == "true"
        text = (await stream).text
    assert text.endswith("data: [DONE]\n\n")
    assert json.loads(text.split("\n\n")[-3][6:])["choices"][0]["finish_reason"] == "length"
    assert await asyncio.to_thread(served.process.wait, 10) == 0


async def test_a_drain_ends_at_its_timeout(peer: ScriptedScheduler) -> None:
    peer.step = 0.01
    address = await peer.start()
    process = await asyncio.to_thread(GatewayProcess, address, drain_timeout=0.3)
    await asyncio.to_thread(process.wait_ready)
    body = {"prompt": "x", "stream": True, "max_tokens": 3000}
    async with httpx.AsyncClient(base_url=process.url, timeout=20) as http:
        stream = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: peer.running == 1)
        assert await asyncio.to_thread(process.stop) == 0
        text = (await stream).text
    assert "shutting down" in json.loads(text.rstrip().rpartition("data: ")[2])["error"]["message"]
    assert peer.aborted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_it_although_streams_are_open(
    peer: ScriptedScheduler, number: signal.Signals
) -> None:
    peer.step = 0.01
    async with ready_gateway(await peer.start(), drain_timeout=60.0) as process:
        async with httpx.AsyncClient(base_url=process.url, timeout=20) as http:
            body = {"prompt": "a b", "max_tokens": 3000, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                process.process.send_signal(number)
                drains = "draining for at most 60 s, 1 requests are open; a second signal ends"
                await eventually(lambda: any(drains in line for line in process.log))
                assert process.process.poll() is None
                process.process.send_signal(number)
                await eventually(lambda: process.process.poll() is not None)
                assert process.process.returncode == 128 + number
        assert any("a second signal: ending at once" in line for line in process.log)


def test_a_gateway_that_cannot_start_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for settings in ({"port": port}, {"schedulers": "nowhere"}):
            config = {"schedulers": "127.0.0.1:1", "port": 0, **settings}
            outcome = run_gateway_once(config)
            assert outcome.returncode == 1
            (line,) = outcome.stderr.splitlines()
            assert line.startswith("pagewire gateway: ")
            assert str(next(iter(settings.values()))) in line


def test_a_gateway_that_fails_when_it_is_connected_ends() -> None:
    """Its connections end with it: a reconnecting client would keep the process."""
    with scheduler(step=0.01) as (address, _):
        outcome = run_gateway_once({"schedulers": address, "port": 0}, missing="fastapi_offline")
    assert outcome.returncode == 1
    assert f"scheduler {address} is connected" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ")


def run_gateway_once(
    config: dict[str, object], missing: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, missing), capture_output=True, text=True, timeout=20, check=False
    )
