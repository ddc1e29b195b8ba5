"""Loading a worker: blocks by memory, automatic settings, dummy weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.quantization.scheme import Quantization
from pagewire.worker.startup.loading import (
    batched_tokens,
    check_fp8,
    choose_device,
    choose_dtype,
    choose_ops,
    load_worker,
    with_kv_cache,
    with_quantization,
)
from support.models.quantized_experts import MXFP4
from support.models.tiny_models import save_model


def test_blocks_follow_from_the_bytes_on_a_cpu(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    # 2 (K, V) * 3 layers * 2 KV heads * 16 tokens * 16 values * 4 bytes
    block = 2 * 3 * 2 * 16 * 16 * 4
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", cpu_kv_bytes=50 * block + 5, torch_threads=1
    )
    loaded = load_worker(settings)
    assert loaded.limits.num_blocks == 50
    assert loaded.backend.kv_cache_bytes == 50 * block
    assert loaded.limits.max_num_batched_tokens == 2048
    with pytest.raises(SetupError, match="holds 32 tokens"):
        load_worker(replace(settings, num_blocks=3, max_model_len=33))


def test_auto_settings_of_a_cpu(model: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert choose_device("cpu") == cpu
    assert choose_dtype("auto", replace(model, dtype="bfloat16"), cpu) == torch.float32
    assert choose_dtype("auto", replace(model, dtype="bfloat16"), torch.device("cuda")) == (
        torch.bfloat16
    )
    assert choose_dtype("float16", model, cpu) == torch.float16
    assert choose_ops("auto", cpu) == "torch"
    with pytest.raises(SetupError, match="needs an NVIDIA GPU"):
        choose_ops("triton", cpu)
    with pytest.raises(SetupError, match="cuda:99"):
        choose_device("cuda:99")
    with pytest.raises(SetupError, match="teapot"):
        choose_device("teapot")


@pytest.mark.parametrize(
    ("count", "top_k", "tokens"), [(128, 8, 16_384), (32, 3, 10_922), (32, 4, 8192), (8, 2, 8192)]
)
def test_steps_are_longer_with_many_experts(
    count: int, top_k: int, tokens: int, tmp_path: Path, model: ModelConfig
) -> None:
    save_model(tmp_path, "qwen3-moe")
    found = read_model_config(tmp_path)
    assert found.experts is not None
    with_experts = replace(found, experts=replace(found.experts, count=count, top_k=top_k))
    assert batched_tokens(with_experts, torch.device("cuda")) == tokens
    assert batched_tokens(model, torch.device("cuda")) == 8192
    assert batched_tokens(with_experts, torch.device("cpu")) == 2048


def test_a_cpu_does_not_take_the_mode_of_one_answer(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    settings = WorkerConfig(model=str(tmp_path), device="cpu", batch_invariant=True)
    with pytest.raises(SetupError, match="--batch-invariant needs the triton operations"):
        load_worker(settings)


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_config_alone_is_enough_for_dummy_weights(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path / "full", variant, initializer_range=0.02)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", load_format="dummy", num_blocks=40, torch_threads=1
    )
    loaded = load_worker(settings)
    loaded.backend.warm_up()
    assert loaded.dtype == "float32"
    assert loaded.limits.max_model_len == 512


def test_random_weights_of_experts_in_four_bits(tmp_path: Path) -> None:
    save_model(tmp_path / "full", "gpt-oss", intermediate_size=96)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", load_format="dummy", num_blocks=40, torch_threads=1
    )
    load_worker(settings).backend.warm_up()


@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_tiles_are_tuned_on_a_gpu_only(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    settings = WorkerConfig(model=str(tmp_path), device="cpu", tune_experts=True)
    with pytest.raises(SetupError, match=r"--tune-experts needs .* with torch: leave it out"):
        load_worker(settings)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    save_model(tmp_path, "mistral")
    return read_model_config(tmp_path)


def test_float32_is_not_tf32_though_the_environment_allows_it(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    torch.set_float32_matmul_precision("high")  # as by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    load_worker(WorkerConfig(model=str(tmp_path), device="cpu", num_blocks=40, torch_threads=1))
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("capability", "supported"), [((8, 0), False), ((8, 9), True)])
def test_fp8_needs_a_gpu_that_multiplies_it(
    model: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    supported: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU of the test")
    device = torch.device("cuda")
    check_fp8(model, device)
    check_fp8(with_quantization(model, "int8"), device)
    fp8 = with_quantization(model, "fp8")
    check_fp8(fp8, torch.device("cpu"))
    fp8_kv = with_kv_cache(model, "fp8")
    check_fp8(fp8_kv, torch.device("cpu"))
    if supported:
        check_fp8(fp8, device)
        check_fp8(fp8_kv, device)
        return
    with pytest.raises(SetupError, match=r"GPU of the test has compute capability 8\.0, and FP8"):
        check_fp8(fp8, device)
    with pytest.raises(SetupError, match=r"8\.0, and FP8 needs 8\.9; leave --kv-cache-dtype out"):
        check_fp8(fp8_kv, device)


def test_blocks_in_fp8_are_smaller(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    settings = WorkerConfig(
        model=str(tmp_path),
        device="cpu",
        dtype="bfloat16",
        cpu_kv_bytes=1 << 20,
        host_memory_gb=0.001,
        torch_threads=1,
    )
    plain, small = (load_worker(replace(settings, kv_cache_dtype=name)) for name in ("auto", "fp8"))
    # Heads of 16 values take 32 bytes, or 16 and a scale of 4.
    for attribute in ("num_blocks", "host_blocks"):
        ratio = getattr(small.limits, attribute) / getattr(plain.limits, attribute)
        assert ratio == pytest.approx(32 / 20, rel=0.02)
    for loaded in (plain, small):
        assert 0.98 * (1 << 20) < loaded.backend.kv_cache_bytes <= 1 << 20
        loaded.backend.warm_up()


def test_a_checkpoint_may_ask_for_a_cache_in_fp8(model: ModelConfig) -> None:
    assert not with_kv_cache(model, "auto").fp8_kv
    asking = replace(model, quantization=Quantization("fp8", (), fp8_kv=True))
    assert with_kv_cache(asking, "auto").fp8_kv


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_plain_weights_are_quantized_by_a_setting(tmp_path: Path, load_format: str) -> None:
    save_model(tmp_path, "llama")
    settings = WorkerConfig(
        model=str(tmp_path),
        device="cpu",
        load_format=load_format,
        quantization="int8",
        num_blocks=40,
        torch_threads=1,
    )
    loaded = load_worker(settings)
    loaded.backend.warm_up()
    plain = load_worker(replace(settings, quantization="none"))
    assert loaded.backend.weight_bytes < 0.7 * plain.backend.weight_bytes


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_experts_in_one_tensor_are_not_quantized(tmp_path: Path, load_format: str) -> None:
    save_model(tmp_path, "granite-moe")
    settings = WorkerConfig(
        model=str(tmp_path), device="cpu", load_format=load_format, quantization="int8"
    )
    with pytest.raises(SetupError, match=r"--quantization int8: .* as granitemoe has, .* float32"):
        load_worker(settings)


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = WorkerConfig(model=str(tmp_path), device="cpu", quantization="fp8", num_blocks=40)
    with pytest.raises(SetupError, match=r"--quantization fp8: .* already, by awq; leave"):
        load_worker(settings)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--num-blocks", {"num_blocks": 2**31 - 1, "block_size": 1024}),
        ("--cpu-kv-bytes", {"cpu_kv_bytes": 10**17}),
    ],
)
def test_a_pool_that_memory_does_not_hold_is_refused_by_its_setting(
    tmp_path: Path, flag: str, settings: dict[str, int]
) -> None:
    save_model(tmp_path, "llama")
    config = WorkerConfig(model=str(tmp_path), device="cpu", **settings)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=rf"KV cache of \d+ blocks \(.+\); lower {flag}$"):
        load_worker(config)


def test_sizes_that_no_memory_holds_name_the_file(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"vocab_size": 2**31 - 1} | {"hidden_size": 2**20})
    )
    settings = WorkerConfig(model=str(tmp_path), device="cpu", torch_threads=1)
    with pytest.raises(SetupError, match=r"no memory for a tensor of .* GB .*config\.json.*sizes"):
        load_worker(settings)
