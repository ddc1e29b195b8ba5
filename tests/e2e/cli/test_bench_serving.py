"""`benchmarks/serving.py` with a tiny model: its services, requests and figures."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from support.models.tiny_models import save_model
from support.rows import values

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "serving.py"


def serving(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), f"--model={model}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)


def test_a_model_without_tokenizer_is_measured_offline_and_over_http(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", "llama", vocab_size=1024, max_position_embeddings=1024)
    output = tmp_path / "serving.jsonl"
    done = serving(tmp_path / "tiny", "--only=single,http-1", "--rounds=2", f"--output={output}")
    assert done.returncode == 0, done.stderr
    result = values(output)
    assert all(name.startswith("tiny/") for name in result)
    assert result["tiny/seconds_to_ready"] > 0
    for line, tokens in (("single", (128, 512)), ("http-1", (8 * 470, 8 * 256))):
        at = f"tiny/{line}/"
        assert (result[f"{at}prompt_tokens"], result[f"{at}output_tokens"]) == tokens
        assert result[f"{at}failed"] == 0
        by_round = f"{at}tokens_per_second_by_round/"
        rates = [rate for name, rate in result.items() if name.startswith(by_round)]
        assert result[f"{at}tokens_per_second"] == max(rates) > 0
        assert len(rates) == 2
    assert result["tiny/single/cached_tokens"] == 0


def test_no_prompt_is_sent_twice() -> None:
    spec = importlib.util.spec_from_file_location("serving", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plans = [
        plan
        for number in range(3)
        for clients in module.HTTP_REQUESTS
        for plan in module.load_plans(clients, number, "http://none", "tiny")
    ]
    assert len({plan.seed for plan in plans}) == len(plans) == 3 * (1 + 4 + 4)


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    done = serving(tmp_path, "--only=single,double")
    assert done.returncode == 2
    assert "'double' is none of" in done.stderr
    done = serving(tmp_path)
    assert done.returncode == 1
    assert "config.json is not there" in done.stderr
    save_model(tmp_path / "tiny", "llama")
    done = serving(tmp_path / "tiny")
    assert done.returncode == 1
    assert "vocab_size is 199" in done.stderr
