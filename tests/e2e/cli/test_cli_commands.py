"""The commands as a user runs them, with the embedded model."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagewire.models import EMBEDDED_NAME
from support.processes.stack_process import RunningStack
from support.rows import values
from support.waiting import until

PAGEWIRE = [sys.executable, "-m", "pagewire.cli.main"]


def pagewire(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*PAGEWIRE, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_the_curl_line_of_the_ready_block_streams_an_answer() -> None:
    """A new user copies the line that `run` prints."""
    command = [*PAGEWIRE, "run", "--port", "0", "--grpc-port", "0", "--log-level", "warning"]
    process = subprocess.Popen(
        [*command, "--num-blocks", "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "gRPC: " in line:
            break
    text = "".join(lines)
    assert f"{EMBEDDED_NAME} at http://127.0.0.1:" in text
    curl = re.search(r"curl -N .*?\}'", text, re.DOTALL)
    assert curl is not None
    body = json.loads(re.search(r"-d '(.*)'", curl[0])[1])  # type: ignore[index]
    assert body["stream"] is True
    url = re.search(r"http://\S+", curl[0])[0]  # type: ignore[index]
    events = stream_lines(url, body)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event[6:])["choices"] for event in events[:-1]]
    assert "".join(p[0]["delta"].get("content") or "" for p in pieces if p).strip()


def stream_lines(url: str, body: dict[str, object]) -> list[str]:
    import httpx

    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as response:
        assert response.status_code == 200
        return [line for line in response.iter_lines() if line.startswith("data: ")]


def test_help_takes_little_time() -> None:
    """User time hardly depends on the load of the machine. An idle one shows the help in 0.5 s."""
    before = os.times().children_user
    done = pagewire("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "chat", "generate", "bench", "worker"))
    assert os.times().children_user - before < 1.0


def test_generate_uses_a_server_that_answers(stack: RunningStack) -> None:
    done = pagewire("generate", "Hello!", "--url", stack.url, "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    again = pagewire("generate", "Hello!", "--url", stack.url, "--temperature", "0")
    assert again.stdout == done.stdout


def test_generate_says_why_a_server_refuses(stack: RunningStack) -> None:
    done = pagewire("generate", "Hello!", "--url", stack.url, "--temperature", "9")
    assert done.returncode == 1
    assert "HTTP status 400" in done.stderr
    assert "temperature" in done.stderr


def test_demo_shows_an_answer_and_its_speed() -> None:
    done = pagewire("demo")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ tokens; time to first token \d+ ms, then \d+ tokens/s", done.stdout)


def test_a_chat_has_turns_and_ends_with_the_input(stack: RunningStack) -> None:
    questions = "Hello!\n\nTell me a story about a fox.\n"
    done = pagewire("chat", "--url", stack.url, "--max-tokens", "24", input=questions)
    assert (done.returncode, done.stderr) == (0, "")
    answers = [text.strip() for text in done.stdout.split(">")[1:]]
    assert len(answers) == 4  # two questions, an empty line, the end
    assert answers[0]
    assert answers[2]


def test_ctrl_c_interrupts_an_answer_but_not_the_chat(stack: RunningStack) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*PAGEWIRE, "chat", "--url", stack.url, "--max-tokens", "400"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    shown = b""

    def read_until(mark: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 30
        while mark not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(leader, 4096)

    try:
        read_until(b"> ")
        shown = b""
        os.write(leader, b"Tell me a long story.\n")
        read_until(b"story.\r\n")
        shown = b""
        shown += os.read(leader, 4096)  # the first piece of the answer
        process.send_signal(signal.SIGINT)
        read_until(b"(interrupted)")
        read_until(b"> ")
        os.write(leader, b"\x04")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_chat_says_how_to_start_a_server() -> None:
    done = pagewire("chat", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("pagewire: no server answers at http://127.0.0.1:9; start one")
    assert len(done.stderr.splitlines()) == 1


def test_health_of_every_kind_of_service(stack: RunningStack) -> None:
    for address in (stack.url, f"{stack.url}/readyz", stack.grpc_address):
        assert pagewire("health", address).returncode == 0
    for address in (f"{stack.url}/nothing", "127.0.0.1:9", "unix:/nowhere", "http://127.0.0.1:9"):
        done = pagewire("health", address)
        assert done.returncode == 1
        assert address in done.stderr


def test_a_port_in_use_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = pagewire("run", "--port", str(port), "--grpc-port", "0")
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_model_ends_run_with_the_reason(tmp_path: Path) -> None:
    done = pagewire("run", "--model", str(tmp_path), "--port", "0", "--grpc-port", "0")
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_that_is_killed_is_replaced(stack: RunningStack) -> None:
    [before] = stack.pids("worker")
    lines = len(stack.log)
    os.kill(before, signal.SIGKILL)
    until(lambda: stack.pids("worker") not in ([before], []), 30)
    done = pagewire("generate", "Hello!", "--url", stack.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert any("worker-0 was ended by SIGKILL" in line for line in stack.log[lines:])


def test_all_services_end_with_a_run_that_is_killed() -> None:
    command = [*PAGEWIRE, "run", "--port", "0", "--grpc-port", "0", "--num-blocks", "600"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "gRPC: " in line:
            break
    stack = RunningStack(process)
    children = [pid for name in ("worker", "scheduler", "gateway") for pid in stack.pids(name)]
    assert len(children) == 3
    process.kill()
    process.wait()
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), 10)


def values_of_model(path: Path) -> dict[str, float]:
    """The figures of the one model of a file."""
    found = values(path)
    (model,) = {name.partition("/")[0] for name in found}
    assert model == "pagewire-chat"
    return {name.removeprefix(f"{model}/"): value for name, value in found.items()}


def test_bench_offline_counts_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_TOKEN", "a token of some length")
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": list(range(5, 25 + n)), "max_tokens": 8 + n} for n in range(6)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "result.jsonl"
    flags = ["--ignore-eos", "--no-detokenize", "--temperature", "0.6", "--grpc-port", "0"]
    flags += ["--num-blocks", "600", "--requests", str(requests), "--output", str(output)]
    done = pagewire("bench", "offline", *flags)
    assert done.returncode == 0, done.stderr
    result = values_of_model(output)
    assert (result["requests"], result["failed"]) == (6, 0)
    assert result["prompt_tokens"] == sum(len(line["prompt_token_ids"]) for line in lines)
    assert result["output_tokens"] == sum(line["max_tokens"] for line in lines)
    assert result["output_tokens_per_second"] == result["output_tokens"] / result["seconds"]
    assert result["start_to_ready_seconds"] > 0
    assert "output throughput" in done.stdout


def test_bench_speculative_replays_texts(tmp_path: Path) -> None:
    """Random weights, with the outputs of the file: one repeats its prompt, one does not."""
    words = "red kite plums garden kitchen house"
    texts = [
        {"kind": "quote", "prompt": f"Say: {words}. {words}.", "continuation": f" {words}." * 4},
        {"kind": "tale", "prompt": "Tell me.", "continuation": "Once the fox saw a moon and sang."},
    ]
    texts[1]["prediction"] = texts[1]["continuation"]
    replay, output = tmp_path / "texts.jsonl", tmp_path / "rows.jsonl"
    replay.write_text("".join(json.dumps(text) + "\n" for text in texts))
    flags = ["--replay", str(replay), "--output", str(output), "--rounds", "1", "--clients", "1,3"]
    flags += ["--requests", "1", "--num-blocks", "300", "--num-slots", "8", "--grpc-port", "0"]
    done = pagewire("bench", "speculative", *flags)
    assert done.returncode == 0, done.stderr
    result = values_of_model(output)
    assert result["quote/1/none/tokens_per_step"] == 1
    assert result["quote/1/suffix/tokens_per_step"] > 2
    assert result["quote/1/suffix/accepted/suffix"] > 10
    assert result["quote/1/suffix/ratio"] > 1
    assert result["tale/3/prediction/accepted/prediction"] > 10
    assert "tale/1/suffix/accepted/prediction" not in result
    assert "by drafter" in done.stdout


@pytest.mark.parametrize(
    ("line", "flags", "part"),
    [
        ("{}", [], "line 1: not"),
        ('{"prompt": "x", "continuation": ""}', [], "line 1: not"),
        ('{"prompt": "x", "continuation": "y", "prediction": 1}', [], "must be strings"),
        ('{"prompt": "x", "continuation": "y"}', ["--kinds", "chat"], "no texts of kind chat"),
        ('{"prompt": "x", "continuation": "y"}', ["--clients", "0"], "at least 1"),
    ],
)
def test_bench_speculative_says_what_it_cannot_replay(
    tmp_path: Path, line: str, flags: list[str], part: str
) -> None:
    replay = tmp_path / "texts.jsonl"
    replay.write_text(line + "\n")
    done = pagewire("bench", "speculative", "--replay", str(replay), *flags)
    assert done.returncode == 1
    assert part in done.stderr


def test_a_worker_with_real_weights_forces_no_text(tmp_path: Path) -> None:
    done = pagewire("worker", "--forced-texts", str(tmp_path), "--worker-address", "127.0.0.1:0")
    assert done.returncode == 1
    assert "needs --load-format dummy" in done.stdout + done.stderr


def test_bench_offline_reports_requests_that_fail(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    good, bad = {"prompt_token_ids": [5, 6], "max_tokens": 4}, {"prompt_token_ids": [10**6]}
    requests.write_text(f"{json.dumps(good)}\n{json.dumps({**bad, 'max_tokens': 4})}\n")
    flags = ["--grpc-port", "0", "--num-blocks", "600", "--ignore-eos"]
    done = pagewire("bench", "offline", *flags, "--requests", str(requests))
    assert done.returncode == 1
    assert "1 requests failed; the first: " in done.stderr
    assert "output tokens              4" in done.stdout


@pytest.mark.parametrize("load", [["--concurrency", "3"], ["--request-rate", "20"]])
def test_bench_http_measures_a_server(stack: RunningStack, tmp_path: Path, load: list[str]) -> None:
    output = tmp_path / "result.jsonl"
    flags = ["--num-requests", "6", "--input-len", "40", "--output-len", "8", "--processes", "2"]
    flags += ["--url", stack.url, "--slo-ttft-ms", "60000", "--output", str(output)]
    done = pagewire("bench", "http", *flags, *load)
    assert done.returncode == 0, done.stderr
    result = values_of_model(output)
    assert (result["requests"], result["failed"], result["output_tokens"]) == (6, 0, 48)
    assert 0.7 < result["prompt_tokens"] / (6 * 40) < 1.3
    assert result["goodput_requests_per_second"] == result["requests_per_second"]
    assert 0 < result["ttft_ms/median"] <= result["e2e_ms/median"]
