"""Allowed values of a quantization_config, and refusals of unsupported ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.quantization.config import parse_quantization
from pagewire.worker.model.quantization.scheme import (
    Fp8Scheme,
    GroupedScheme,
    Int8Scheme,
    Quantization,
)
from support.models.tiny_models import save_model

DOWN = "model.layers.3.mlp.down_proj"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


def parsed(raw: dict[str, Any]) -> Quantization:
    found = parse_quantization({"quantization_config": raw})
    assert found is not None
    return found


# As compressed-tensors writes it.
KV = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
    "group_size": None,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> Any:
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more}


def compressed(kind: str = "float-quantized", **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group(WEIGHTS, INPUTS)},
        "kv_cache_scheme": None,
        **changes,
    }


def packed(**weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **weights}
    return compressed("pack-quantized", config_groups={"group_0": group(given)})


@pytest.mark.parametrize("raw", [compressed(), {"quant_method": "fp8"}])
def test_a_cache_in_fp8_may_be_asked_for(raw: dict[str, Any]) -> None:
    plain = parse_quantization({"quantization_config": raw})
    asking = parse_quantization({"quantization_config": {**raw, "kv_cache_scheme": KV}})
    assert plain is not None
    assert asking == replace(plain, fp8_kv=True)
    assert not plain.fp8_kv


def test_plain_weights_have_none() -> None:
    assert parse_quantization({}) is None
    assert parse_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("raw", "scheme"),
    [
        (AWQ, GroupedScheme(4, 128, symmetric=False)),
        ({**AWQ, "version": "GEMM", "group_size": -1}, GroupedScheme(4, None, symmetric=False)),
        (GPTQ, GroupedScheme(4, 128, symmetric=True)),
        ({**GPTQ, "bits": 8, "desc_act": True}, GroupedScheme(8, 128, True, ordered=True)),
        ({"quant_method": "fp8"}, Fp8Scheme(per_tensor=True)),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            Fp8Scheme(per_tensor=True, static=True),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8Scheme(block=(128, 128))),
        (compressed(), Fp8Scheme()),
        (compressed(quantization_status="frozen", sparsity_config={}, version="0.12"), Fp8Scheme()),
        (packed(), GroupedScheme(4, 128, symmetric=True)),
        (packed(symmetric=False, actorder="group"), GroupedScheme(4, 128, False, ordered=True)),
        (packed(actorder="weight"), GroupedScheme(4, 128, symmetric=True)),
        (packed(strategy="channel", group_size=None), GroupedScheme(4, None, symmetric=True)),
        (
            compressed(
                "int-quantized",
                config_groups={
                    "group_0": group({**WEIGHTS, "type": "int"}, {**INPUTS, "type": "int"})
                },
            ),
            Int8Scheme(),
        ),
    ],
)
def test_schemes(raw: dict[str, Any], scheme: Any) -> None:
    found = parsed(raw)
    assert found.scheme_of(DOWN) == scheme
    assert found.scheme_of("lm_head") is None


def test_the_version_of_gptq_decides_what_a_zero_point_means() -> None:
    assert parsed(GPTQ).method == "gptq"
    assert parsed({**GPTQ, "checkpoint_format": "gptq_v2"}).method == "gptq_v2"


def test_a_name_goes_before_a_pattern_and_a_pattern_before_the_class() -> None:
    eight = group({**WEIGHTS, "type": "int"}, {**INPUTS, "type": "int"}, format="int-quantized")
    four = group({"num_bits": 4, "type": "int", "strategy": "channel"}, format="pack-quantized")
    found = parsed(
        compressed(
            "mixed-precision",
            config_groups={
                "all": group(WEIGHTS, INPUTS, format="float-quantized"),
                "pattern": {**eight, "targets": ["re:.*down_proj"]},
                "name": {**four, "targets": [DOWN]},
            },
        )
    )
    assert found.scheme_of(DOWN) == GroupedScheme(4, None, symmetric=True)
    assert found.scheme_of("model.layers.4.mlp.down_proj") == Int8Scheme()
    assert found.scheme_of("model.layers.4.mlp.up_proj") == Fp8Scheme()


@pytest.mark.parametrize(
    "raw",
    [
        compressed(ignore=["lm_head", DOWN]),
        compressed(ignore=[r"re:.*layers\.3\..*"]),
        {"quant_method": "fp8", "ignored_layers": [DOWN]},
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3"]},
        {**AWQ, "modules_to_not_convert": ["down"]},
        {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]},
    ],
)
def test_layers_are_left_out(raw: dict[str, Any]) -> None:
    found = parsed(raw)
    assert found.scheme_of(DOWN) is None
    assert found.scheme_of("model.layers.30.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"quant_method": ["fp8"]}, ["quant_method", "['fp8']", "gptq"]),
        (compressed() | {"ignore": ["re:("]}, ["ignore", "'re:('", "regular expression"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "gptq", "awq"]),
        ({"bits": 4}, ["quant_method", "missing"]),
        ({**GPTQ, "bits": 3}, ["gptq", "quantization_config.bits", "3", "4, 8"]),
        ({**GPTQ, "group_size": 48}, ["group_size", "48", "powers of two"]),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, ["dynamic", "down"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        ({**AWQ, "version": "gemv"}, ["awq", "version", "gemv", "gemm"]),
        ({**AWQ, "zero_point": False}, ["zero_point", "False"]),
        ({**AWQ, "bits": 8}, ["bits", "8"]),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ["weight_block_size", "64"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt", "e5m2"]),
        ({"quant_method": "fp8", "activation_scheme": "none"}, ["activation_scheme", "none"]),
        ({"quant_method": "fp8", "rotation": "hadamard"}, ["rotation", "hadamard"]),
        (compressed("marlin-24"), ["compressed-tensors", "format", "marlin-24"]),
        (compressed(quantization_status="calibration"), ["quantization_status", "calibration"]),
        (compressed(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme.type", "int"]),
        (compressed(kv_cache_scheme={**KV, "num_bits": 4}), ["kv_cache_scheme.num_bits", "4"]),
        (compressed(kv_cache_scheme={**KV, "dynamic": True}), ["kv_cache_scheme.dynamic", "True"]),
        (compressed(kv_cache_scheme={**KV, "strategy": "attn_head"}), ["strategy", "attn_head"]),
        (compressed(kv_cache_scheme={**KV, "symmetric": False}), ["kv_cache_scheme.symmetric"]),
        (compressed(kv_cache_scheme={**KV, "group_size": 64}), ["kv_cache_scheme.group_size"]),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, ["kv_cache_scheme", "static"]),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config.format"]),
        (compressed(transform_config={"config_groups": {"u": {}}}), ["transform_config"]),
        (compressed(config_groups=None), ["config_groups"]),
        (packed(num_bits=3), ["config_groups.group_0.weights.num_bits", "3"]),
        (packed(type="float"), ["weights.type", "float"]),
        (
            compressed(config_groups={"group_0": group(WEIGHTS, {**INPUTS, "num_bits": 4})}),
            ["group_0.input_activations.num_bits", "4"],
        ),
        (
            compressed(config_groups={"group_0": group(WEIGHTS, {**INPUTS, "symmetric": False})}),
            ["input_activations.symmetric"],
        ),
        (compressed(config_groups={"group_0": group(WEIGHTS)}), ["weights alone"]),
        (
            compressed(config_groups={"group_0": group(WEIGHTS, INPUTS, output_activations={})}),
            ["output_activations"],
        ),
    ],
)
def test_what_is_not_supported_is_named(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        parsed(raw)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_file_and_line_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=1))
    with pytest.raises(SetupError, match=r"config\.json, line \d+: quantization_config"):
        read_model_config(tmp_path)
