"""Settings of a scheduler."""

import math
from dataclasses import dataclass
from typing import Literal

from pagewire.config.fields import metrics_port, setting
from pagewire.config.shared import ModelConfig, RequestConfig, TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(RequestConfig, ModelConfig, TokenizerConfig):
    """Settings of a scheduler, the control plane of a group of workers."""

    skip_tokenizer: bool = setting(
        False,
        "Serve token ids only: prompts are token ids, and answers have no text. No tokenizer is "
        "needed then.",
    )
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "qwen3_coder",
        "mistral",
        "pythonic",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "granite",
        "glm45",
        "seed_oss",
        "harmony",
    ] = setting(
        "auto",
        "Format in which the model calls tools. By default it is detected from the chat template.",
    )
    reasoning_parser: Literal[
        "auto", "none", "think", "mistral", "granite", "seed_oss", "kimi", "command_a", "harmony"
    ] = setting(
        "auto",
        "Format of the model's reasoning. By default it is detected from the chat template.",
    )
    chat_template: str | None = setting(
        None, "File with a Jinja chat template, used instead of the model's own."
    )
    grpc_host: str = setting(
        "127.0.0.1", "Address to listen on for gRPC, or unix:PATH, which needs no port."
    )
    grpc_port: int = setting(
        50051, "Port to listen on for gRPC; 0 takes a free one.", minimum=0, maximum=65535
    )
    workers: str = setting(
        "127.0.0.1:50061",
        "Addresses of the workers, separated by commas: host:port, unix:PATH, dns:NAME:PORT for "
        "every address that a name resolves to, or file:PATH for every address in a file, one a "
        "line. Names are resolved, and files read, again and again.",
    )
    share_workers: bool = setting(
        False,
        "Share the workers with other schedulers that have this setting and the same workers. Each "
        "worker is used by one of them, and each of them uses its part. Without it a scheduler "
        "takes every worker that it knows from any other.",
    )
    rebalance_after: float = setting(
        5.0,
        "With share_workers: seconds without a scheduler or worker that comes or goes, after which "
        "a scheduler with more than its share gives workers up to others. Its sequences there "
        "have drain_timeout to end, and then run on its other workers.",
        minimum=0.1,
    )
    routing: Literal["prefix-aware", "round-robin", "least-loaded"] = setting(
        "prefix-aware", "How a worker is chosen for a request."
    )
    policy: str = setting(
        "fcfs",
        "Order in which requests are admitted, and which one is preempted when KV memory runs "
        "out: fcfs, priority, longest-prefix, deadline, fair-share, or an installed policy.",
    )
    max_num_seqs: int | None = setting(
        None,
        "Maximum number of sequences that run on one worker; by default as many as it has slots.",
        minimum=1,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Maximum number of tokens computed in one step; by default as many as the worker takes.",
        minimum=1,
    )
    tpot_slo_ms: float | None = setting(
        None,
        "Longest time, in milliseconds, that a step with running sequences should take. Chunks of "
        "long prompts in it are made small enough for that. By default there is no limit.",
        minimum=0.1,
    )
    long_prompt_share: float = setting(
        0.4,
        "Share of a worker's time that long prompts get at least while sequences decode there. A "
        "prompt is long if it takes more than four full steps (max_num_batched_tokens). Less makes "
        "tokens beside long prompts come sooner; 1 means that decodes wait for each chunk.",
        minimum=0.01,
        maximum=1,
    )
    memory_threshold: float = setting(
        0.9,
        "Fraction of a worker's KV blocks up to which new requests are admitted. The rest is room "
        "for running requests to grow.",
        minimum=0.01,
        maximum=1,
    )
    prefix_caching: bool = setting(
        True, "Keep the KV of finished requests and reuse it for prompts with the same prefix."
    )
    max_waiting_requests: int = setting(
        8192,
        "Maximum number of requests that wait for admission; further ones are refused (HTTP 429).",
        minimum=1,
    )
    max_waiting_tokens: int = setting(
        1 << 24,
        "Maximum number of tokens of all requests that wait for admission, predictions included; "
        "further requests are refused (HTTP 429), unless nothing waits.",
        minimum=1,
    )
    max_waiting_seconds: float = setting(
        60.0,
        "Longest expected wait for admission, in seconds. It is estimated from the rate at which "
        "the queue empties; a request that would wait longer is refused (HTTP 429). While the "
        "queue is younger than half this time, and than 5 s, four times as much is allowed. Give "
        "less than the target for the time to first token, such as 1, where a late answer is worth "
        "nothing; with `inf` requests wait without limit.",
        minimum=0.001,
        maximum=math.inf,
    )
    hand_back_after: float = setting(
        2.0,
        "Seconds without a ready worker after which the waiting requests of gateways are handed "
        "back, so that the gateway sends them to another scheduler or waits for one.",
        minimum=0,
    )
    no_worker_timeout: float = setting(
        30.0,
        "Seconds without a ready worker after which requests of gRPC clients other than gateways "
        "fail with UNAVAILABLE.",
        minimum=0,
    )
    max_retry_attempts: int = setting(
        2,
        "How often a request runs again after it failed on a worker without progress. Also how "
        "many workers in a row it may lose before it runs alone on one; it fails if two of those "
        "crash too.",
        minimum=0,
    )
    run_ahead: int = setting(
        2,
        "Steps sent to a worker before the first of them is answered. While steps take less than "
        "2 ms, at least 4 are sent.",
        minimum=1,
    )
    check_invariants: bool = setting(
        False,
        "Check every block, slot and sequence of a worker after each of its steps, and exit if one "
        "is inconsistent. For tests and debugging; it costs time.",
    )
    tokenizer_processes: int = setting(
        2,
        "Maximum number of helper processes that tokenize large prompts; "
        "each holds the model's tokenizer.",
        minimum=1,
    )
    max_prompt_chars: int = setting(
        4 << 20,
        "Maximum number of characters in a prompt or conversation that is tokenized.",
        minimum=1,
    )
    trust_request_chat_template: bool = setting(
        False,
        "Render the chat templates that requests bring in `chat_template`. They run in a sandbox "
        "in helper processes, but one may occupy a helper process for as long as `parse_timeout`: "
        "allow it to trusted clients only. By default such requests are refused.",
    )
    grammar_processes: int = setting(
        2,
        "Maximum number of helper processes that compile the grammars of structured outputs.",
        minimum=1,
    )
    max_grammar_seconds: float = setting(
        0.5,
        "Longest time, in seconds, that the grammar of a structured output may take to compile; "
        "otherwise the request is refused. Workers compile it again, in less than this.",
        minimum=0.001,
    )
    max_grammar_nodes: int = setting(
        4096,
        "Maximum number of values in the JSON schema of a structured output, and of choices.",
        minimum=1,
    )
    scheduler_metrics_port: int | None = metrics_port("scheduler")
