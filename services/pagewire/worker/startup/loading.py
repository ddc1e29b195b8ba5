"""Loads a worker: chooses device and operations, loads weights and kernels, sizes the KV cache."""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from pagewire.config import WorkerConfig
from pagewire.limits import MAX_LOGPROBS
from pagewire.models import resolve_model, resolve_tokenizer
from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import load_weights
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.eagle.config import EagleConfig
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.model.kv_cache import (
    block_bytes,
    blocks_in,
    host_blocks_in,
    measure_free_bytes,
)
from pagewire.worker.model.pooling import read_pooling
from pagewire.worker.model.quantization.config import online_quantization
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import dummy_weights
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.blocks import check_block_size
from pagewire.worker.protocol.backend import LoadedWorker
from pagewire.worker.protocol.steps.device_plan import dummy_plan
from pagewire.worker.protocol.steps.forced_texts import read_forced_texts
from pagewire.worker.protocol.steps.limits import (
    Limits,
    fit_to_pool,
    kept_window,
    longest_sequence,
)
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.runtime.graphs.backend import GraphBackend
from pagewire.worker.runtime.pooling import PoolingBackend
from pagewire.worker.startup.arranged_weights import arranged_weights
from pagewire.worker.startup.compile_pool import CompilePool, CompileResult
from pagewire.worker.startup.draft_model import (
    WITH_MODEL,
    draft_cost,
    load_draft_model,
    read_draft_model,
)
from pagewire.worker.startup.kernel_record import KernelRecord
from pagewire.worker.startup.one_answer import check_one_answer
from pagewire.worker.startup.phases import StartupPhases
from pagewire.worker.startup.pooled_model import PoolingHead, pooled_model

log = logging.getLogger(__name__)

CPU_BATCHED_TOKENS = 2048
# The most drafts of a row, by the type of device. On a CPU, steps of more rows take longer, so more
# drafts would have to be right. A GPU computes 16 rows in little more time than one.
MAX_DRAFTS = {"cpu": 7, "cuda": 15}
GPU_BATCHED_TOKENS = 8192
# With many experts a step has up to twice as many tokens, so that an expert has this many rows on
# average. With fewer rows, more of its tiles are partly empty (docs/decisions/step-size.md).
EXPERT_ROWS = 1024
FP8_CAPABILITY = (8, 9)  # the first whose tensor cores multiply FP8


def load_worker(
    config: WorkerConfig, pool: CompilePool | None = None, phases: StartupPhases | None = None
) -> LoadedWorker:
    """Loads the model and its kernels and allocates the KV cache. It does not warm up.

    Must run on the thread that will run the steps, because torch has a number of CPU threads for
    each thread. `pool` compiles kernels; without one, a pool is started if needed.

    Raises:
        SetupError, FileNotFoundError: the model or the settings cannot be used.
    """
    device = choose_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.torch_threads or len(os.sched_getaffinity(0)))
    # An environment variable may allow TF32, which keeps 11 bits of a float32's precision.
    torch.set_float32_matmul_precision("highest")
    folder = resolve_model(config.model)
    with torch.inference_mode():
        try:
            return _load(config, folder, device, pool, phases or StartupPhases())
        except RuntimeError as error:
            if device.type == "cpu" and "DefaultCPUAllocator" in str(error):
                raise SetupError(_no_memory(folder, error)) from error
            raise


def _load(
    config: WorkerConfig,
    folder: Path,
    device: torch.device,
    pool: CompilePool | None,
    phases: StartupPhases,
) -> LoadedWorker:
    model = with_quantization(read_model_config(folder), config.quantization)
    model = with_kv_cache(model, config.kv_cache_dtype)
    check_fp8(model, device)
    check_forced_texts(config)
    scores = config.task == "score"
    tokenizer = resolve_tokenizer(config.model, config.tokenizer) if scores else None
    pooling = read_pooling(folder, config.task, tokenizer)
    if pooling is not None:
        model = pooled_model(model, pooling, config.max_model_len)
    dtype = choose_dtype(config.dtype, model, device)
    trial = _trial_limits(config, model, device)
    kernels = choose_ops(config.ops, device)
    check_block_size(config.block_size, kernels)
    if kernels == "triton":
        model = model.with_heads_for_kernels()
    if config.batch_invariant:
        check_one_answer(model, pooling, kernels, device, trial.max_model_len)
    ops = load_ops("invariant" if config.batch_invariant else kernels)
    tables = rope_tables(model, trial.max_model_len, device)
    phases.end("device")
    check_speculation(config, device, kernels, pooling is not None)
    draft_model = read_draft_model(config, model, trial.max_model_len)
    if kernels == "triton" and draft_model is not None:
        served = served_by_kernels(config, draft_model[1], device, trial.max_model_len)
        draft_model = draft_model[0], served
    graphs = device.type != "cpu" and kernels == "triton" and pooling is None
    if config.tune_experts and (not graphs or model.experts is None or dtype.itemsize != 2):
        raise SetupError(
            f"--tune-experts needs a model with experts in bfloat16 or float16 and the triton "
            f"operations; this is {model.family} in {_name(dtype)} with {kernels}: leave it out"
        )
    if config.tune_experts and model.experts_quantized:
        raise SetupError(
            f"--tune-experts is for experts with plain weights; those of this {model.family} are "
            "quantized: leave it out"
        )
    if graphs:
        from pagewire.worker.startup.precompile import (
            collect_kernels,
            load_kernels,
            report_compilations,
        )
        from pagewire.worker.startup.tuning import choose_expert_tiles, choose_gemms

        if config.batch_invariant:
            from pagewire.worker.startup.invariance import check_invariance

        def launch_before_graphs(decoder: Decoder) -> None:
            _largest_step(decoder, trial, dtype)
            if config.batch_invariant:
                check_invariance(
                    decoder.config,
                    decoder.weights,
                    config.block_size,
                    dtype,
                    same=lambda *_: True,  # nothing is computed
                )

        record = KernelRecord(config)
        if not record.exists():
            pool = pool or CompilePool()
            collect_kernels(
                model,
                ops,
                tables,
                trial,
                dtype,
                launch_before_graphs,
                pool.submit,
                None if draft_model is None else draft_model[1],
            )
            phases.end("collecting kernels")
    pooled_head = PoolingHead(pooling, model, device)
    if config.load_format == "dummy":
        weights = served_weights(model, dummy_weights(model, dtype, device, config.seed))
        pooled_head.randomize(config.seed)
    else:
        weights = load_weights(folder, model, dtype, device, pooled_head.tensors())
    weights, head = pooled_head.take(arranged_weights(weights, ops))
    decoder = Decoder(model, weights, ops, tables)
    draft = load_draft_model(config, draft_model, decoder, trial.max_model_len)
    phases.end("weights")
    compiled: list[CompileResult] = []
    if graphs:
        if config.batch_invariant:
            if pool is not None:  # the check launches kernels, which would be compiled one by one
                compiled, pool = pool.finish(), None
                phases.end("compiling")
            check_invariance(model, weights, config.block_size, dtype)
            phases.end("comparing bits")
        decoders = [decoder]
        if draft is not None:
            decoders.append(draft.decoder if isinstance(draft, EagleHead) else draft)
        choose_gemms(decoders, trial, config.batch_invariant, record)
        phases.end("choosing GEMM algorithms")
        if pool is not None:
            compiled = pool.finish()
            phases.end("compiling")
        if config.tune_experts:  # after compiling, because it launches kernels
            choose_expert_tiles(decoder, trial)
            phases.end("choosing tiles of experts")
    elif pool is not None:
        pool.close()
    late: list[str] = []

    def profile() -> None:
        _largest_step(decoder, trial, dtype)
        if draft is not None:  # only captured steps draft
            late.extend(load_kernels(decoder, trial, dtype, draft))

    limits = _limits(config, decoder, draft, trial, dtype, profile)
    phases.end("measuring memory")
    if graphs:
        late += load_kernels(decoder, limits, dtype, draft)
        report_compilations(compiled, late)
        record.write()
        phases.end("loading kernels")
    backend: EagerBackend
    try:
        if pooling is not None:
            backend = PoolingBackend(decoder, limits, dtype, pooling, head)
        elif graphs:
            backend = GraphBackend(decoder, limits, dtype, draft)
        else:
            backend = EagerBackend(decoder, limits, dtype, draft)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise SetupError(
            f"there is no memory for a KV cache of {limits.num_blocks} blocks ({error}); lower "
            f"{_pool_flag(config, device)}"
        ) from error
    phases.end("KV cache")
    return LoadedWorker(
        backend,
        limits,
        _name(dtype),
        _describe(device),
        uses_triton=kernels == "triton",
        batch_invariant=config.batch_invariant,
        fp8_kv=model.fp8_kv,
    )


def _no_memory(folder: Path, error: Exception) -> str:
    """The message for tensors that the host has no memory for."""
    wanted = re.search(r"allocate (\d+) bytes", str(error))
    size = f" of {int(wanted[1]) / 1e9:.3f} GB" if wanted else ""
    return (
        f"there is no memory for a tensor{size} of the model that {folder / 'config.json'} "
        "describes; correct its sizes, lower --max-model-len, or use a larger machine"
    )


def choose_device(name: str) -> torch.device:
    """The device of `--device`; SetupError if torch does not see it on this machine."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SetupError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise SetupError(
            f"device {name!r} is not available: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu or a CUDA build of torch"
        )
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of `--dtype`. `auto` is the type of the model on a GPU, float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def with_quantization(model: ModelConfig, name: Literal["none", "fp8", "int8"]) -> ModelConfig:
    """The model with the quantization of `--quantization`.

    SetupError if it has one already, or cannot be quantized.
    """
    if name == "none":
        return model
    if model.quantization is not None:
        raise SetupError(
            f"--quantization {name}: the weights are quantized already, by "
            f"{model.quantization.method}; leave --quantization out, or give plain weights"
        )
    model.check_quantizable(f"--quantization {name}")
    return replace(model, quantization=online_quantization(name))


def with_kv_cache(model: ModelConfig, name: Literal["auto", "fp8"]) -> ModelConfig:
    """The model with the KV cache of `--kv-cache-dtype`; `auto` uses that of the checkpoint.

    SetupError for FP8 and a model with latent attention.
    """
    if name == "fp8" and model.latent is not None:
        raise SetupError(
            f"--kv-cache-dtype fp8: {model.family} has latent attention, whose KV cache is in the "
            "model's type only; leave --kv-cache-dtype out"
        )
    asked = model.quantization is not None and model.quantization.fp8_kv
    return replace(model, fp8_kv=name == "fp8" or asked)


def check_fp8(model: ModelConfig, device: torch.device) -> None:
    """Raises SetupError if weights or KV cache are in FP8 and the GPU has no FP8."""
    weights = model.quantization is not None and model.quantization.has_fp8
    if device.type != "cuda" or not (weights or model.fp8_kv):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        remedy = "use weights in INT8 or four bits"
        if not weights:
            remedy = "leave --kv-cache-dtype out, and use weights without kv_cache_scheme"
        raise SetupError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, and FP8 needs 8.9; {remedy}"
        )


def check_speculation(
    config: WorkerConfig, device: torch.device, kernels: str, pools: bool
) -> None:
    """Raises SetupError if --speculate is on and this worker does not support it."""
    drafts = config.speculate in WITH_MODEL
    if config.draft_model is not None and not drafts:
        raise SetupError(
            f"--draft-model {config.draft_model} needs --speculate {' or '.join(WITH_MODEL)}; add "
            "it or leave --draft-model out"
        )
    if config.speculate == "none":
        return
    name = f"--speculate {config.speculate}"
    if drafts and config.draft_model is None:
        raise SetupError(f"{name} needs the model that drafts: add --draft-model")
    if drafts and config.forced_texts is not None:
        raise SetupError(
            f"{name}: --forced-texts needs random weights, with which a model drafts "
            "nothing right; use --speculate suffix"
        )
    if pools:
        raise SetupError(f"{name}: this model pools and generates nothing; leave it out")
    if device.type != "cpu" and kernels != "triton":
        raise SetupError(
            f"{name} on {device} needs the kernels that make drafts; leave --ops {kernels} out"
        )
    if config.block_size < 2:
        raise SetupError(f"{name} needs blocks of 2 tokens or more (--block-size)")


def served_by_kernels(
    config: WorkerConfig, model: ModelConfig | EagleConfig, device: torch.device, longest: int
) -> ModelConfig | EagleConfig:
    """A draft model or EAGLE head with attention heads for the Triton kernels.

    SetupError if they cannot serve it.
    """
    if isinstance(model, EagleConfig):
        layer = served_by_kernels(config, model.model, device, longest)
        assert isinstance(layer, ModelConfig)
        return replace(model, model=layer)
    try:
        check_fp8(model, device)
        model = model.with_heads_for_kernels()
        if config.batch_invariant:
            check_one_answer(model, None, "triton", device, longest)
        return model
    except SetupError as error:
        raise SetupError(f"--draft-model {config.draft_model}: {error}") from error


def check_forced_texts(config: WorkerConfig) -> None:
    """Raises SetupError for forced texts with real weights: they are only for benchmarks."""
    if config.forced_texts is None:
        return
    if config.load_format != "dummy":
        raise SetupError(
            "--forced-texts is for benchmarks: outputs are those of a file, whatever the model "
            "says. It needs --load-format dummy, which makes random weights; leave it out to serve"
        )
    log.warning("every output is that of a recorded text (--forced-texts): for benchmarks only")


def most_drafts(config: WorkerConfig, device: torch.device) -> int:
    """The most drafts of a row, less than the tokens of a block; 0 without speculation."""
    if config.speculate == "none":
        return 0
    return min(MAX_DRAFTS[device.type], config.block_size - 1)


def choose_ops(
    name: Literal["auto", "torch", "triton"], device: torch.device
) -> Literal["torch", "triton"]:
    """The operations of `--ops`. `auto` is triton on a GPU, torch on a CPU."""
    if name == "auto":
        return "torch" if device.type == "cpu" else "triton"
    if name == "triton" and device.type == "cpu":
        raise SetupError("--ops triton needs an NVIDIA GPU; use --ops torch on a CPU")
    return name


def batched_tokens(model: ModelConfig, device: torch.device) -> int:
    """The tokens of a full step, if no flag says it."""
    if device.type == "cpu":
        return CPU_BATCHED_TOKENS
    if model.experts is None:
        return GPU_BATCHED_TOKENS
    wanted = EXPERT_ROWS * model.experts.count // model.experts.top_k
    return min(max(wanted, GPU_BATCHED_TOKENS), 2 * GPU_BATCHED_TOKENS)


def _trial_limits(config: WorkerConfig, model: ModelConfig, device: torch.device) -> Limits:
    """The limits before the memory is measured: one block, and the longest possible sequence."""
    batched = config.worker_max_num_batched_tokens or batched_tokens(model, device)
    if min(config.num_slots, batched, config.block_size) < 1:
        raise SetupError(
            "num_slots, worker_max_num_batched_tokens and block_size must be at least 1"
        )
    forced = None
    if config.forced_texts is not None:
        forced = read_forced_texts(Path(config.forced_texts), model.vocab_size)
    return Limits(
        forced=forced,
        vocab_size=model.vocab_size,
        num_slots=config.num_slots,
        block_size=config.block_size,
        num_blocks=1,
        host_blocks=1 if config.host_memory_gb else 0,
        max_drafts=most_drafts(config, device),
        drafts_on_device=config.speculate != "none" and device.type != "cpu",
        draft_model=config.speculate in WITH_MODEL,
        max_model_len=longest_sequence(model.max_position_embeddings, config.max_model_len),
        max_num_batched_tokens=batched,
    )


def _limits(
    config: WorkerConfig,
    decoder: Decoder,
    draft: Decoder | EagleHead | None,
    trial: Limits,
    dtype: torch.dtype,
    profile: Callable[[], None],
) -> Limits:
    """The final limits, with `--num-blocks` blocks, or all blocks that fit into the memory.

    A block has the KV of both models if there is a draft model. `profile` runs the largest steps.
    """
    device = decoder.weights.embedding.device
    size = block_bytes(decoder.config, config.block_size, dtype)
    if draft is not None:
        size += block_bytes(draft.config, config.block_size, dtype)
    if draft is not None and device.type == "cpu":  # a graph backend times its passes itself
        cost = draft_cost(decoder, draft, trial, dtype)
        log.info(
            "a draft of the draft model takes %.0f %% of the time of a step",
            100 * cost,
        )
        trial = replace(trial, draft_cost=cost)
    flag = _pool_flag(config, device)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif device.type == "cpu":
        num_blocks = blocks_in(config.cpu_kv_bytes, size, flag)
    else:
        free = measure_free_bytes(device, config.gpu_memory_utilization, profile)
        num_blocks = blocks_in(free, size, flag)
    longest = trial.max_model_len
    host_blocks = host_blocks_in(config.host_memory_gb, size)
    window = kept_window(decoder.config.windows, longest, host_blocks, trial.max_drafts)
    return replace(
        trial,
        num_blocks=num_blocks,
        max_model_len=fit_to_pool(
            longest, config.max_model_len, num_blocks, config.block_size, size, window
        ),
        host_blocks=host_blocks,
        window=window,
    )


def _pool_flag(config: WorkerConfig, device: torch.device) -> str:
    """The setting that determines the number of blocks."""
    if config.num_blocks is not None:
        return "--num-blocks"
    return "--cpu-kv-bytes" if device.type == "cpu" else "--gpu-memory-utilization"


def _largest_step(decoder: Decoder, limits: Limits, dtype: torch.dtype) -> None:
    """Runs a step with all tokens in chunks and a sampled row for every slot.

    Its KV goes to the scratch block.
    """
    rows = min(limits.num_slots, limits.max_num_batched_tokens)
    length = min(limits.max_num_batched_tokens // rows, limits.max_model_len)
    backend = EagerBackend(decoder, limits, dtype)
    plan = dummy_plan(limits, 0, chunks=rows, chunk_length=length, num_top=MAX_LOGPROBS)
    backend.wait(backend.submit(plan))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"
