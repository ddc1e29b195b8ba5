"""Configuration of every process, as frozen dataclasses.

One field is one setting: a command-line flag (`--num-blocks`), an environment variable
(`PAGEWIRE_NUM_BLOCKS`) and a key of a configuration file (`num_blocks`). The command line builds
its flags from these classes, so help texts, types and defaults are written here only.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


def setting(
    default: Any,
    help_text: str,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with a default, the help text and the range that the command line uses."""
    bounds = {"minimum": minimum, "maximum": maximum}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={"help": help_text, **given})


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """What every process has."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe log messages shown."
    )
    drain_timeout: float = setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", minimum=0
    )
    metrics_host: str = setting(
        "127.0.0.1", "Address that Prometheus metrics are served on, where they have a port."
    )
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate (chain) of this process, which gRPC servers show, and "
        "clients where they are asked. A `unix:` address is not encrypted.",
    )
    tls_key: str | None = setting(None, "PEM file with the key of tls_cert.")
    tls_ca: str | None = setting(
        None,
        "PEM file with the authority of the processes' certificates. gRPC connections to others "
        "are encrypted and their certificates checked; servers take clients with a certificate "
        "only.",
    )
    tls_verify_clients: bool = setting(
        True, "Ask the clients of this process for a certificate, where tls_ca is given."
    )
    tls_server_name: str | None = setting(
        None, "Name in the certificates of gRPC servers, where it is not their address."
    )


@dataclass(frozen=True, kw_only=True)
class RequestConfig(ProcessConfig):
    """What gateways and schedulers have, which both take requests of clients: over HTTP, and over
    gRPC."""

    api_keys_file: str | None = setting(
        None,
        "YAML or JSON list of API keys as `pagewire keys new` prints them, read again on SIGHUP. "
        "The environment variable PAGEWIRE_API_KEYS may hold further keys, separated by commas. "
        "Without any key everybody may ask.",
    )
    scheduler_token_file: str | None = setting(
        None,
        "File with a token that schedulers ask their gateways for, and gRPC clients where there "
        "are no API keys; by default the environment variable PAGEWIRE_SCHEDULER_TOKEN.",
    )
    max_body_bytes: int = setting(
        16 << 20,
        "Largest request body that is read; at a scheduler the largest message of a call with an "
        "API key.",
        minimum=1,
    )
    max_open_requests: int | None = setting(
        None,
        "Most generating requests, or calls with an API key, being answered; further ones are "
        "refused as too many. By default 8192, at a gateway or as many as it may have connections "
        "for.",
        minimum=1,
    )
    max_open_body_bytes: int = setting(
        1 << 30,
        "Most bytes that the bodies of all generating requests, or calls with an API key, being "
        "answered may have together; further ones are refused as too many.",
        minimum=1,
    )

    parse_timeout: float = setting(
        30.0,
        "Seconds that a helper process may take to parse, render and tokenize one large request.",
        minimum=0.1,
    )
    max_messages: int = setting(4096, "Most messages of a conversation.", minimum=1)
    max_template_bytes: int = setting(
        1 << 16, "Most bytes of chat_template_kwargs, as they are sent.", minimum=1
    )
    max_template_nodes: int = setting(
        4096, "Most values in chat_template_kwargs, nested ones included.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class StepConfig(ProcessConfig):
    """What both ends of a step have."""

    step_timeout: float = setting(
        60.0,
        "Seconds that a worker has for one step. A scheduler takes one that needs longer for lost "
        "and runs its requests elsewhere; the worker itself says that it is not healthy, and ends "
        "if the same step takes twice as long.",
        minimum=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(RequestConfig):
    """The OpenAI-style HTTP service."""

    host: str = setting("127.0.0.1", "Address to listen on for HTTP.")
    port: int = setting(
        8000, "Port to listen on for HTTP; 0 takes a free one.", minimum=0, maximum=65535
    )
    schedulers: str = setting(
        "127.0.0.1:50051",
        "Addresses of the schedulers, separated by commas: host:port or unix:PATH. A DNS name "
        "stands for every address it resolves to.",
    )
    resume_timeout: float = setting(
        30.0,
        "Seconds that a request waits for a scheduler with a ready worker, whether it is new or "
        "has lost its own, before it fails.",
        minimum=0,
    )
    max_resumes: int = setting(
        3,
        "Schedulers that may be lost with a request in a row, without a token of it in between; "
        "then it is tried alone in a scheduler, and fails if two of those end with it.",
        minimum=1,
    )
    max_json_nodes: int = setting(
        2_000_000,
        "Most values in the JSON of a request body, counted before it is parsed.",
        minimum=1,
    )
    parser_processes: int = setting(
        2, "Most helper processes that parse large request bodies.", minimum=1
    )
    https_cert: str | None = setting(
        None, "PEM file with the certificate (chain) shown to HTTP clients: HTTPS instead of HTTP."
    )
    https_key: str | None = setting(None, "PEM file with the key of https_cert.")
    cors_origins: str = setting(
        "",
        "Origins whose pages may call the API from a browser, separated by commas, or `*` for "
        "any; none by default.",
    )
    openapi: bool = setting(False, "Describe the HTTP API at /openapi.json.")
    gateway_metrics_port: int | None = setting(
        None,
        "Port for the gateway's Prometheus metrics; none by default.",
        minimum=0,
        maximum=65535,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(RequestConfig, StepConfig):
    """The control plane."""

    model: str = setting(
        "embedded",
        "Model folder in Hugging Face format, cached hub id, or `embedded` for the small chat "
        "model that comes with Pagewire. The scheduler reads its tokenizer and chat template only.",
    )
    served_model_name: str | None = setting(
        None, "Name that requests use for the model; by default the last part of its path."
    )
    skip_tokenizer: bool = setting(
        False, "Serve token ids only, without text; the model's folder needs no tokenizer then."
    )
    grpc_host: str = setting("127.0.0.1", "Address to listen on for gRPC.")
    grpc_port: int = setting(
        50051, "Port to listen on for gRPC; 0 takes a free one.", minimum=0, maximum=65535
    )
    workers: str = setting(
        "127.0.0.1:50061",
        "Addresses of the workers, separated by commas: host:port, unix:PATH, or dns:NAME:PORT for "
        "every address that a name resolves to, now and later.",
    )
    worker_token_file: str | None = setting(
        None,
        "File with a token that workers ask their schedulers for; by default the environment "
        "variable PAGEWIRE_WORKER_TOKEN.",
    )
    routing: Literal["prefix-aware", "round-robin", "least-loaded"] = setting(
        "prefix-aware", "Which of several workers takes a request."
    )
    policy: str = setting(
        "fcfs",
        "Order of admission, and choice of victim when memory runs out: fcfs, priority, "
        "longest-prefix, deadline, fair-share, or one that is installed.",
    )
    max_num_seqs: int | None = setting(
        None, "Most sequences running on one worker; by default as many as it has slots.", minimum=1
    )
    max_num_batched_tokens: int | None = setting(
        None, "Most tokens computed in one step; by default as many as the worker takes.", minimum=1
    )
    tpot_slo_ms: float | None = setting(
        None,
        "Milliseconds that a step with running sequences should take at most: chunks of long "
        "prompts beside them become as small as that needs. None by default.",
        minimum=0.1,
    )
    memory_threshold: float = setting(
        0.9,
        "New requests are admitted while at most this fraction of a worker's KV blocks is in use; "
        "the rest is room for running ones to grow.",
        minimum=0,
        maximum=1,
    )
    prefix_caching: bool = setting(
        True, "Keep the KV of finished requests, to be shared by requests that begin alike."
    )
    max_waiting_requests: int = setting(
        8192,
        "Most requests waiting for admission; further ones are refused as too many.",
        minimum=1,
    )
    max_waiting_tokens: int = setting(
        1 << 24,
        "Most tokens of the requests waiting for admission; further requests are refused as too "
        "many, unless nothing waits.",
        minimum=1,
    )
    max_waiting_seconds: float = setting(
        1.0,
        "Seconds that a request may be expected to wait for admission, by how fast the queue has "
        "been emptying; four times that in a queue that has stood for less than half of it. "
        "Further requests are refused as too many. Keep it below the target for the time to the "
        "first token; `inf` lets requests of a batch wait as long as it takes.",
        minimum=0.001,
    )
    hand_back_after: float = setting(
        2.0,
        "Seconds without a ready worker after which the waiting requests of gateways go back to "
        "them, to go on at another scheduler or to wait for one.",
        minimum=0,
    )
    no_worker_timeout: float = setting(
        30.0,
        "Seconds without a ready worker after which requests of other gRPC clients, whom no "
        "gateway can send elsewhere, fail as unavailable.",
        minimum=0,
    )
    max_retry_attempts: int = setting(
        2,
        "How often a request is run again after failing on a worker without any progress; also "
        "how many workers in a row may be lost with it before it is tried alone, and fails if two "
        "of those end with it.",
        minimum=0,
    )
    run_ahead: int = setting(
        2,
        "Steps sent to a worker before the first of them is answered; at least 4 while steps "
        "take less than 2 ms.",
        minimum=1,
    )
    check_invariants: bool = setting(
        False,
        "Check every block, slot and sequence of a worker after each of its steps, and end the "
        "scheduler if something is wrong; for tests and fault finding.",
    )
    tokenizer_processes: int = setting(
        2,
        "Most helper processes that tokenize large prompts; each holds the model's tokenizer.",
        minimum=1,
    )
    max_prompt_chars: int = setting(
        4 << 20, "Longest text of a prompt or conversation that is tokenized.", minimum=1
    )
    scheduler_metrics_port: int | None = setting(
        None,
        "Port for the scheduler's Prometheus metrics; none by default.",
        minimum=0,
        maximum=65535,
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(StepConfig):
    """The process that holds weights and KV cache."""

    unready_after: float | None = setting(
        None,
        "Seconds that a step may take before the worker says that it is not ready, until it gets "
        "on: what runs goes on, new requests go elsewhere. By default 1.5 on a GPU; on a CPU, "
        "whose steps may take long, --step-timeout.",
        minimum=0.1,
    )
    model: str = setting(
        "embedded",
        "Model folder in Hugging Face format, cached hub id, or `embedded` for the small chat "
        "model that comes with Pagewire.",
    )
    served_model_name: str | None = setting(
        None, "Name that requests use for the model; by default the last part of its path."
    )
    worker_address: str = setting(
        "127.0.0.1:50061", "Address to listen on for gRPC: host:port or unix:PATH."
    )
    worker_token_file: str | None = setting(
        None,
        "File with a token that workers ask their schedulers for; by default the environment "
        "variable PAGEWIRE_WORKER_TOKEN.",
    )
    device: str = setting(
        "auto", "Device as torch names it; `auto` takes the first GPU, or the CPU without one."
    )
    ops: Literal["auto", "torch", "triton"] = setting(
        "auto", "Kernels: `triton` on a GPU, `torch` anywhere; `auto` chooses by device."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Type of weights and KV cache; `auto` takes the model's own on a GPU and float32 on a CPU.",
    )
    load_format: Literal["safetensors", "dummy"] = setting(
        "safetensors", "`dummy` makes random weights from config.json alone."
    )
    block_size: int = setting(
        16, "Tokens a KV block; the triton kernels take multiples of 16.", minimum=1
    )
    num_blocks: int | None = setting(
        None, "KV blocks in the pool; by default as many as the free memory holds.", minimum=2
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Fraction of the device's memory for weights, activations and KV cache together.",
        minimum=0,
        maximum=1,
    )
    cpu_kv_bytes: int = setting(
        1 << 30, "Bytes of KV cache on a CPU when num_blocks is not given.", minimum=1
    )
    host_memory_gb: float = setting(
        0.0,
        "Gigabytes of the host's memory, pinned on a GPU, for KV that has no room on the device: "
        "what preempted and ended requests leave, copied back where that is faster than "
        "computing it again. 0 for none.",
        minimum=0,
    )
    num_slots: int = setting(256, "Most sequences at once.", minimum=1)
    max_model_len: int | None = setting(
        None, "Most tokens of a sequence; by default what config.json allows.", minimum=1
    )
    worker_max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens computed in one step; by default 8192 on a GPU, 2048 on a CPU.",
        minimum=1,
    )
    seed: int = setting(0, "Seed of dummy weights.")
    torch_threads: int | None = setting(
        None, "CPU threads of torch; by default all cores.", minimum=1
    )
    worker_metrics_port: int | None = setting(
        None, "Port for the worker's Prometheus metrics; none by default.", minimum=0, maximum=65535
    )


@dataclass(frozen=True, kw_only=True)
class SimulatedWorkerConfig(StepConfig):
    """Workers that compute no model: deterministic tokens, in the time of a device."""

    model: str = setting(
        "embedded",
        "Model folder in Hugging Face format, cached hub id, or `embedded`; only its config.json "
        "is read, for the vocabulary and the longest sequence.",
    )
    served_model_name: str | None = setting(
        None, "Name that requests use for the model; by default the last part of its path."
    )
    worker_address: str = setting(
        "127.0.0.1:50061",
        "Address to listen on for gRPC: host:port or unix:PATH. Several workers take the ports "
        "that follow, or PATH.0, PATH.1 and so on.",
    )
    worker_token_file: str | None = setting(
        None,
        "File with a token that workers ask their schedulers for; by default the environment "
        "variable PAGEWIRE_WORKER_TOKEN.",
    )
    count: int = setting(1, "Workers in this process, each with an address of its own.", minimum=1)
    profile: Literal["h200-llama-3.1-8b", "h200-qwen3-0.6b"] = setting(
        "h200-llama-3.1-8b", "Device and model whose step times and KV memory are simulated."
    )
    speedup: float = setting(
        1.0, "How many times faster than the device steps are; 0 takes no time at all.", minimum=0
    )
    block_size: int = setting(16, "Tokens a KV block.", minimum=1)
    num_blocks: int | None = setting(
        None, "KV blocks in the pool; by default as many as the profile's memory holds.", minimum=2
    )
    host_memory_gb: float = setting(
        0.0,
        "Gigabytes of the host's memory for KV that has no room on the device, at the profile's "
        "copying speed. 0 for none.",
        minimum=0,
    )
    num_slots: int = setting(256, "Most sequences at once.", minimum=1)
    max_model_len: int | None = setting(
        None, "Most tokens of a sequence; by default what config.json says.", minimum=1
    )
    worker_max_num_batched_tokens: int | None = setting(
        None, "Most tokens computed in one step; by default the profile's.", minimum=1
    )
    worker_metrics_port: int | None = setting(
        None,
        "Port for Prometheus metrics of all workers; none by default.",
        minimum=0,
        maximum=65535,
    )
