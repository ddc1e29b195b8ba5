"""A worker's start as on an H100, on any machine: whole models, from loading to steps.

All launched kernels must be compiled ahead, and graphs captured without the host. The starts run in
a separate process, because Triton's interpreter, which other tests use, replaces the
compiler. Run as a script, this file prints a report as JSON. With `--compile`, it compiles every
kernel of the named models, or of all, with their limits on a GPU, and prints kernels that do not
compile, spill, or do not fit:

    PYTHONPATH=services:shared:tests python tests/kernels/compile/test_start.py --compile "8B AWQ"
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.slots import Slots
from pagewire.worker.protocol.steps.step import Start, Step, StepPrefixGroup, StepSampling
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
SMALL = {"num_slots": 12, "worker_max_num_batched_tokens": 1100, "max_model_len": 4096}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
AWQ = LLAMA | {
    "torch_dtype": "float16",
    "quantization_config": {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
    },
}
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
EXPERTS = QWEN | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
FP8, FP8_KV = {"quantization": "fp8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}
DRAFTS = {"speculate": "suffix"}
DRAFT = QWEN | {"vocab_size": LLAMA["vocab_size"]}
HEAD = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "8B": (LLAMA, {}),
    "8B, drafts": (LLAMA, DRAFTS),
    "8B AWQ": (AWQ, {}),
    "8B AWQ, drafts": (AWQ, DRAFTS),
    "8B FP8": (LLAMA, FP8),
    "8B FP8, FP8 KV, drafts": (LLAMA, FP8_KV | DRAFTS),
    "8B, draft model": (LLAMA, {"speculate": "draft", "draft_model": DRAFT}),
    "8B, head": (LLAMA, {"speculate": "eagle", "draft_model": HEAD}),
    "8B FP8, FP8 KV, head": (LLAMA, FP8_KV | {"speculate": "eagle", "draft_model": HEAD}),
    "8B, one answer, head": (
        LLAMA,
        {"speculate": "eagle", "draft_model": HEAD, "batch_invariant": True},
    ),
    "8B, one answer, drafts": (LLAMA, DRAFTS | {"batch_invariant": True}),
    "0.6B": (QWEN, {}),
    "30B-A3B": (EXPERTS, {}),
    "30B-A3B FP8, drafts": (EXPERTS, FP8 | DRAFTS),
    "gpt-oss": (GPT_OSS, {}),
    "gpt-oss, drafts": (GPT_OSS, DRAFTS),
}
# Decode rows, chunks and tokens of each chunk.
STEPS = ((1, 0, 0), (12, 0, 0), (0, 1, 300), (5, 2, 100), (3, 1, 1000))


def start_of(case: str, settings: dict[str, Any]) -> Any:
    """The start of a worker, and steps."""
    from pagewire.config import WorkerConfig
    from pagewire.worker.protocol.steps.device_plan import dummy_plan
    from pagewire.worker.startup import loading
    from support.kernels.pretended_hopper import PretendedStart, pretended

    model, own = CASES[case]
    found = PretendedStart()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(pretended(found))
        Path(folder, "config.json").write_text(json.dumps(model))
        if (draft := own.get("draft_model")) is not None:
            other = stack.enter_context(tempfile.TemporaryDirectory())
            Path(other, "config.json").write_text(json.dumps(draft))
            own = own | {"draft_model": other}
        config = WorkerConfig(model=folder, load_format="dummy", **own, **settings)
        loaded = loading.load_worker(config)
        backend, limits = loaded.backend, loaded.limits
        backend.warm_up()
        for decodes, chunks, length in STEPS:
            for num_top in (None, 0, 5, 20):
                plan = dummy_plan(limits, decodes, chunks, length, num_top)
                backend.wait(backend.submit(plan))
        for plan in plans(limits, backend.row_costs):
            backend.wait(backend.submit(plan))
    return found


def plans(limits: Limits, costs: RowCosts | None) -> Iterator[DevicePlan]:
    """Steps of sequences: prompts, decode rows, both, with and without masks.

    One sequence has penalties and biases, two share a prefix, and one begins with a copied block.
    """
    slots = Slots(limits, None, costs)
    adjusted = StepSampling(
        frequency_penalty=0.5, bias_ids=np.array([7], np.int32), biases=np.ones(1, np.float32)
    )
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"sampling": adjusted, "blocks": ints(10, 11, 22, 23)},
        {"copied_block": 1, "num_computed": 20},
    )
    starts = tuple(start(slot, **given) for slot, given in enumerate(settings))
    counts = [40 - each.num_computed for each in starts]
    yield planned(slots, starts=starts, prefill_slots=ints(0, 1, 2), prefill_counts=ints(*counts))
    groups = (StepPrefixGroup(2, ints(0, 1)),)
    plan = planned(slots, decode_slots=ints(0, 1, 2), groups=groups)
    assert plan.groups
    yield plan
    none = np.zeros(1, np.int64)
    masks: Any = SimpleNamespace(
        rows=ints(1),
        slots=ints(1),
        firsts=none,
        stamps=none,
        advance=lambda tokens: None,
        compiles=lambda: False,
    )
    yield replace(plan, masks=masks)
    yield replace(plan, masks=masks, logprobs=LogprobRows(ints(0), 5))
    yield planned(slots)
    chunk = {"prefill_slots": ints(3), "prefill_counts": ints(40)}
    plan = planned(slots, starts=(start(3, prompt_logprobs=3),), **chunk)
    yield plan
    yield replace(plan, masks=masks)


def start(slot: int, **given: Any) -> Start:
    """A sequence of 40 tokens with blocks for 64."""
    defaults = {
        "token_ids": np.tile(np.arange(8, dtype=np.int32), 5),
        "num_generated": 0,
        "num_computed": 0,
        "blocks": np.arange(4, dtype=np.int32) + 10 * (slot + 1),
        "sampling": StepSampling(logprobs=2),
    }
    return Start(slot=slot, **defaults | given)


def planned(slots: Slots, **fields: Any) -> DevicePlan:
    none = ("append_slots", "append_blocks", "prefill_slots", "prefill_counts")
    defaults = {"number": 1, "starts": (), "decode_slots": None, **dict.fromkeys(none, ints())}
    step = slots.plan(Step(**defaults | fields))
    assert not step.failures
    return step.plan


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def report() -> dict[str, Any]:
    found = {}
    for case in CASES:
        start = start_of(case, SMALL)
        found[case] = {
            "ahead": sorted({job.kernel for job in start.ahead}),
            "late": sorted({job.kernel for job in start.late}),
            "refused": sorted(set(start.refused)),
            "profiled": sorted({job.kernel for job in start.profiled}),
        }
    return found


def compile_all(cases: list[str]) -> None:
    """Compile every variant of some cases, each in a fork, and print those with faults."""
    jobs = {}
    for case in cases:
        for job in start_of(case, {}).ahead:
            jobs.setdefault((job.module, job.kernel, job.specialization), case)
        print(f"{case}: {len(jobs)} variants so far", flush=True)
    slowest = 0.0
    for (module, kernel, specialization), case in jobs.items():
        began, (read, write) = time.monotonic(), os.pipe()
        if os.fork() == 0:
            try:
                fault = fault_of(module, kernel, specialization)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            os.write(write, fault.encode()[:4000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            fault = pipe.read().decode()
        os.wait()
        slowest = max(slowest, time.monotonic() - began)
        if fault:
            constants = json.loads(specialization)["constant_vals"]
            print(f"{case}: {kernel}, constants {constants}: {fault}", flush=True)
    print(f"{len(jobs)} variants, the slowest in {slowest:.1f} s")


def fault_of(module: str, kernel: str, specialization: str) -> str:
    """Compile a variant; return its faults, or an empty text."""
    from triton import knobs

    from support.kernels.cross_compile import keep_report

    with patch.object(knobs.runtime, "add_stages_inspection_hook", keep_report):
        compiled = getattr(import_module(module), kernel).preload(specialization)
    metadata = compiled.metadata
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", metadata.assembler_report))
    faults = [f"{spilled} bytes spilled"] if spilled else []
    if metadata.shared > SHARED_LIMIT:
        faults.append(f"{metadata.shared} bytes of shared memory")
    return ", ".join(faults)


@pytest.fixture(scope="module")
def starts() -> dict[str, Any]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_is_compiled_before_it_is_launched(case: str, starts: dict) -> None:
    assert starts[case]["ahead"]
    assert starts[case]["late"] == []


@pytest.mark.parametrize("case", CASES)
def test_graphs_need_no_host(case: str, starts: dict) -> None:
    assert starts[case]["refused"] == []


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("8B AWQ", {"fragment_gemm_kernel", "fragment_vector_kernel"}),
        ("8B FP8", {"scaled_stream_kernel", "scaled_hopper_kernel", "_scaled_kernel"}),
        (
            "8B FP8, FP8 KV, drafts",
            {"_locate_kernel", "_embed_kernel", "decode_kernel", "prefill_hopper_kernel"},
        ),
        ("30B-A3B", {"_scores_kernel", "_gate_up_kernel", "_down_kernel", "_sort_kernel"}),
        ("30B-A3B FP8, drafts", {"experts_scaled_hopper_kernel", "_gate_up_kernel"}),
        ("gpt-oss", {"_packed_gate_up_kernel", "_packed_down_kernel", "_packed_kernel"}),
        ("8B, draft model", {"_locate_kernel", "_end_kernel", "decode_kernel"}),
        ("8B, head", {"_locate_kernel", "_qk_norm_rope_kv_write_kernel", "_end_kernel"}),
        ("8B, one answer, drafts", {"stream_kernel", "_ordered_kernel", "_segment_decode_kernel"}),
        ("0.6B", {"stream_kernel", "_vector_kernel"}),
    ],
)
def test_models_take_their_kernels(case: str, kernels: set, starts: dict) -> None:
    assert kernels <= {*starts[case]["ahead"]}


@pytest.mark.parametrize("case", [case for case in CASES if "draft_model" in CASES[case][1]])
def test_drafts_are_part_of_the_memory_profile(case: str, starts: dict) -> None:
    assert "_locate_kernel" in starts[case]["profiled"]  # only captured steps launch it


if __name__ == "__main__":
    from support.kernels.pretended_hopper import pretend

    pretend()
    if sys.argv[1:2] == ["--compile"]:
        compile_all(sys.argv[2:] or list(CASES))
    else:
        print(json.dumps(report()))
