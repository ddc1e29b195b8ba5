"""Settings of a worker."""

from dataclasses import dataclass
from typing import Literal

from pagewire.config.fields import setting
from pagewire.config.shared import TokenizerConfig, WorkerLimitsConfig


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WorkerLimitsConfig, TokenizerConfig):
    """Settings of a worker, the process that holds the weights and the KV cache."""

    unready_after: float | None = setting(
        None,
        "Seconds that a step may take before the worker reports itself not ready, until the step "
        "is done. Running requests continue; new ones go to other workers. By default 1.5 on a "
        "GPU; on a CPU, whose steps may take long, --step-timeout.",
        minimum=0.1,
    )
    start_phase_timeout: float = setting(
        1800.0,
        "Seconds that one phase of a worker's start may take, such as reading the weights or "
        "capturing CUDA graphs. After that it writes its stacks to the log, and it exits when the "
        "phase has taken twice as long.",
        minimum=0.1,
    )
    backend: Literal["torch", "command"] = setting(
        "torch", "What computes: the model itself, or the external program of --command."
    )
    command: str | None = setting(
        None,
        "The external program with its arguments, as in a shell but without one. It reads and "
        "writes JSON lines.",
    )
    command_timeout: float = setting(
        30.0,
        "Seconds that the external program may take for the next token of a sequence. A program "
        "that writes nothing in this time is started again.",
        minimum=0.1,
    )
    command_start_timeout: float = setting(
        600.0, "Seconds that the external program may take for its first line.", minimum=0.1
    )
    task: Literal["auto", "generate", "embed", "score"] = setting(
        "auto",
        "What the model does: generate text, embed a text as a vector, or score a document for a "
        "query. `auto` embeds with a folder of sentence-transformers or a model without a head, "
        "scores with a sequence classifier, and generates with any other model. A model does one "
        "task; the endpoints of the others refuse it.",
    )
    device: str = setting(
        "auto", "Device as torch names it; `auto` takes the first GPU, or the CPU without one."
    )
    ops: Literal["auto", "torch", "triton"] = setting(
        "auto", "Operations: `triton` on a GPU, `torch` on any device; `auto` chooses by device."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Type of weights and KV cache where they are not quantized; `auto` takes the model's own "
        "on a GPU and float32 on a CPU.",
    )
    batch_invariant: bool = setting(
        False,
        "Compute tokens and log probabilities whose bits depend on the request alone, not on the "
        "batch, chunks, cached or shared prefixes. It needs the triton operations on a GPU and a "
        "Llama, Mistral, Qwen2 or Qwen3 model, and costs speed.",
    )
    speculate: Literal["none", "suffix", "draft", "eagle"] = setting(
        "none",
        "Draft the next tokens of a sequence and compute them in the same step. `suffix` drafts "
        "what followed the last time that the sequence or a recent output of its salt ended like "
        "this, and clients' predictions; on a CPU also what grammars force. `draft` also asks the "
        "smaller model of --draft-model, `eagle` the EAGLE-3 head there. Tokens stay the same; on "
        "a GPU they do with --batch-invariant, as they depend on the batch without it.",
    )
    draft_model: str | None = setting(
        None,
        "With --speculate draft: folder or hub id of the model that drafts, which has the "
        "vocabulary of the model. With --speculate eagle: that of an EAGLE-3 head for the model. "
        "Its KV is beside the model's, so fewer blocks fit.",
    )
    load_format: Literal["safetensors", "dummy"] = setting(
        "safetensors", "`dummy` makes random weights and needs no more than a config.json."
    )
    forced_texts: str | None = setting(
        None,
        "For benchmarks only, with --load-format dummy: file of the outputs that the worker gives "
        "to its prompts, whatever the model says. `pagewire bench speculative` sets it.",
    )
    quantization: Literal["none", "fp8", "int8"] = setting(
        "none",
        "Quantize plain weights while they are loaded, all linear layers but the head. Quantized "
        "checkpoints need no setting.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "Type of keys and values in the KV cache. `fp8` stores them in eight bits with a scale for "
        "each token and head, so that about twice the tokens fit. `auto` is the type of --dtype, "
        "or FP8 where the checkpoint has a kv_cache_scheme.",
    )
    tune_experts: bool = setting(
        False,
        "Time tiles of a model's experts when the worker starts, and use the fastest. Needs a GPU.",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Fraction of the device's memory for weights, activations and KV cache together.",
        minimum=0.01,
        maximum=1,
    )
    cpu_kv_bytes: int = setting(
        1 << 30, "Bytes of the KV cache on a CPU, if num_blocks is not given.", minimum=1
    )
    structured_output: bool = setting(
        True,
        "Take structured outputs. For them the worker starts processes that read the model's "
        "tokenizer; 150,000 tokens take about a second.",
    )
    mask_processes: int | None = setting(
        None,
        "Processes that compute the masks of structured outputs; by default half of the "
        "cores, at most 8.",
        minimum=1,
        maximum=64,
    )
    seed: int = setting(0, "Seed of dummy weights.", minimum=0, maximum=2**63 - 1)
    torch_threads: int | None = setting(
        None, "CPU threads of torch; by default one a core.", minimum=1, maximum=4096
    )
